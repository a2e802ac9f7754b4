//! Gradients at sizes that leave an odd tail after vectors and tiles, with keys that are hidden
//! and heads that are shared.

use crate::gradients::{apply, check, ids, t};
use merak_trace::{
    Op, TensorType,
    fx::AttentionTerms,
    op::{Activation, Attention, DropoutSpec, RelativeBuckets, Rope, WeightLayout},
};

/// Around the widths of vector registers and their multiples.
const WIDTHS: [usize; 10] = [1, 2, 3, 7, 15, 16, 17, 31, 33, 63];

/// A lookup in a table whose row 3 is not trained.
const LOOKUP: Op = Op::Embedding {
    padding: Some(3),
    slice: None,
};

#[test]
fn rows_of_any_width() {
    for width in WIDTHS {
        let rows = t(&[3, width]);
        let twice = [rows.clone(), rows.clone()];
        let one = std::slice::from_ref(&rows);
        let named = |name: &str| format!("{name} of width {width}");
        check(&named("softmax"), one, &[], apply(Op::Softmax));
        check(&named("silu_mul"), &twice, &[], apply(Op::SiluMul));
        check(&named("add"), &twice, &[], apply(Op::Add));
        check(&named("mul"), &twice, &[], apply(Op::Mul));
        for kind in [
            Activation::GeluTanh,
            Activation::GeluErf,
            Activation::Silu,
            Activation::Tanh,
        ] {
            check(&named("activation"), one, &[], apply(Op::Activation(kind)));
        }
        for p in [0.0, 0.4] {
            let dropout = DropoutSpec {
                p,
                key: 99,
                slice: None,
                nested: None,
            };
            check(&named("dropout"), one, &[], apply(Op::Dropout(dropout)));
        }
        let labels = [0, -100, i64::try_from(width).expect("small") - 1];
        for label_smoothing in [0.0, 0.1] {
            check(
                &named("cross_entropy"),
                one,
                &[ids("labels", &[3], &labels)],
                apply(Op::CrossEntropy { label_smoothing }),
            );
        }
        check(
            &named("rms_norm"),
            &[rows.clone(), t(&[width])],
            &[],
            apply(Op::RmsNorm { eps: 1e-5 }),
        );
        if width > 2 {
            // The norm of two numbers is almost a step function, which differences cannot follow.
            check(
                &named("layer_norm"),
                &[rows.clone(), t(&[width]), t(&[width])],
                &[],
                apply(Op::LayerNorm { eps: 1e-5 }),
            );
        }
        check(
            &named("embedding"),
            &[t(&[5, width])],
            &[ids("ids", &[4], &[4, 0, 4, 2])],
            |module, params, ids| module.apply(LOOKUP, &[&ids[0], &params[0]]),
        );
    }
}

#[test]
fn relu_of_any_width() {
    // Noise has no number within a step of the kink.
    for width in WIDTHS {
        let op = Op::Activation(Activation::Relu);
        let name = format!("relu of width {width}");
        check(&name, &[t(&[3, width])], &[], apply(op));
    }
}

#[test]
fn products_of_any_shape() {
    for (rows, inner, outer) in [(1, 1, 1), (1, 17, 3), (5, 3, 17), (7, 33, 5), (17, 5, 9)] {
        for layout in [WeightLayout::OutIn, WeightLayout::InOut] {
            let mut w = [0; 2];
            (w[layout.in_dim()], w[layout.out_dim()]) = (inner, outer);
            check(
                &format!("linear {rows} x {inner} x {outer}"),
                &[t(&[rows, inner]), t(&w), t(&[outer])],
                &[],
                apply(Op::Linear { layout, bias: true }),
            );
        }
    }
}

#[test]
fn rotations_of_any_share_of_a_head() {
    for (head_dim, pairs) in [(2, 1), (6, 3), (10, 2), (34, 17)] {
        let inv_freq = (0..pairs).map(|pair: u8| 0.5_f32.powi(pair.into()));
        let rope = Rope {
            head_dim,
            inv_freq: inv_freq.collect(),
            scale: 1.0,
            inverse: false,
        };
        check(
            &format!("rope of {pairs} pairs of {head_dim}"),
            &[t(&[1, 3, 2 * head_dim])],
            &[ids("positions", &[3], &[0, 7, 1])],
            apply(Op::Rope(rope)),
        );
    }
}

/// An attention of one sample or two.
struct Shape {
    batch: usize,
    q_len: usize,
    k_len: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    causal: bool,
    window: Option<usize>,
    /// Keys at the end of each sample but the first that are hidden.
    hidden: usize,
}

impl Shape {
    fn operands(&self) -> [TensorType; 3] {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        [
            t(&[self.batch, self.q_len, q]),
            t(&[self.batch, self.k_len, kv]),
            t(&[self.batch, self.k_len, kv]),
        ]
    }

    fn check(&self, name: &str) {
        let spec = Attention {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: 0.7,
            causal: self.causal,
            window: self.window,
            ..Attention::default()
        };
        let mask: Vec<_> = (0..self.batch * self.k_len)
            .map(|key| {
                let is_last = key % self.k_len + self.hidden >= self.k_len;
                i64::from(key < self.k_len || !is_last)
            })
            .collect();
        let mask = [ids("seen", &[self.batch, self.k_len], &mask)];
        let mask = if self.hidden > 0 { &mask[..] } else { &[] };
        check(name, &self.operands(), mask, |module, x, ids| {
            let terms = AttentionTerms {
                seen: ids.first(),
                bias: None,
            };
            let mixed = module.attention_with([&x[0], &x[1], &x[2]], terms, &spec, 0.0)?;
            Ok(vec![mixed])
        });
    }
}

const PLAIN: Shape = Shape {
    batch: 1,
    q_len: 1,
    k_len: 1,
    heads: 1,
    kv_heads: 1,
    head_dim: 1,
    causal: false,
    window: None,
    hidden: 0,
};

#[test]
fn attentions_of_any_shape() {
    PLAIN.check("one of everything");
    Shape {
        q_len: 7,
        k_len: 7,
        heads: 3,
        head_dim: 5,
        causal: true,
        ..PLAIN
    }
    .check("three heads of queries on one of keys");
    Shape {
        batch: 2,
        q_len: 5,
        k_len: 9,
        heads: 4,
        kv_heads: 2,
        head_dim: 3,
        hidden: 4,
        ..PLAIN
    }
    .check("more keys than queries, some hidden, heads shared");
    Shape {
        batch: 2,
        q_len: 9,
        k_len: 5,
        heads: 2,
        kv_heads: 2,
        hidden: 5,
        ..PLAIN
    }
    .check("a sample whose keys are all hidden");
    Shape {
        q_len: 17,
        k_len: 17,
        heads: 2,
        head_dim: 3,
        causal: true,
        window: Some(4),
        ..PLAIN
    }
    .check("a window over shared heads");
}

/// Attention of two heads over one of keys, with dropout and a bias by relative position.
fn check_biased(q_len: usize, k_len: usize, causal: bool, p: f64) {
    let spec = Attention {
        heads: 2,
        kv_heads: 1,
        head_dim: 3,
        scale: 0.7,
        causal,
        ..Attention::default()
    };
    let buckets = RelativeBuckets {
        q_len,
        k_len,
        buckets: 8,
        max_distance: 20,
        bidirectional: !causal,
    };
    let kv = t(&[1, k_len, 3]);
    let operands = [t(&[1, q_len, 6]), kv.clone(), kv, t(&[8, 2])];
    let name = format!("{q_len} queries, {k_len} keys with a bias, dropout {p}");
    check(&name, &operands, &[], |module, x, _| {
        let index = module.relative_buckets(buckets)?;
        let terms = AttentionTerms {
            seen: None,
            bias: Some([&x[3], &index]),
        };
        let mixed = module.attention_with([&x[0], &x[1], &x[2]], terms, &spec, p)?;
        Ok(vec![mixed])
    });
}

#[test]
fn attentions_with_a_bias_of_any_shape() {
    for (q_len, k_len, causal) in [
        (1, 1, true),
        (1, 17, false),
        (17, 1, false),
        (7, 33, false),
        (17, 17, true),
        (33, 5, false),
    ] {
        check_biased(q_len, k_len, causal, 0.0);
    }
    check_biased(17, 9, false, 0.3);
    // One query more than a tile has.
    check_biased(65, 3, false, 0.0);
}

#[test]
fn attentions_with_dropout_of_any_shape() {
    for (len, p) in [(1, 0.3), (17, 0.3), (33, 0.5)] {
        let spec = Attention {
            heads: 3,
            kv_heads: 1,
            head_dim: 1,
            scale: 0.7,
            causal: true,
            dropout: Some(DropoutSpec {
                p,
                key: 5,
                slice: None,
                nested: None,
            }),
            ..Attention::default()
        };
        let operands = [t(&[1, len, 3]), t(&[1, len, 1]), t(&[1, len, 1])];
        check(
            &format!("attention of {len} with dropout"),
            &operands,
            &[],
            apply(Op::Attention(spec)),
        );
    }
}

#[test]
fn attentions_over_several_tiles() {
    // Tiles have 64 queries and 256 keys.
    Shape {
        q_len: 65,
        k_len: 65,
        head_dim: 1,
        causal: true,
        ..PLAIN
    }
    .check("a query after the first tile");
    Shape {
        batch: 2,
        q_len: 3,
        k_len: 259,
        hidden: 130,
        ..PLAIN
    }
    .check("a tile of keys that are hidden in part");
}
