//! Random chains of layers: many ranks compute the same as one, over either axis and over both.

use crate::{
    run::{assert_same, assert_same_on},
    support::{apply, linear, lists},
};
use merak_mpu::Degrees;
use merak_tp::{Error, Options, Sequence, SequenceMethod, rewrite, rewrite_with};
use merak_trace::{
    DType, Graph, Init, Op, ParamRole, Result, TensorType,
    fx::{self, Module, Symbol},
    op::{Activation, Attention, Rope, WeightLayout},
};
use proptest::prelude::*;

/// A link of a random chain; every one maps `[2, S, 8]` to `[2, S, 8]`.
#[derive(Debug, Clone, Copy)]
enum Link {
    Mlp(Activation, bool),
    Column,
    Row,
    Plain,
    Norm,
    Gated,
    Fused,
    Dropout,
    Scale,
    Positions,
    Scores,
    HeadNorm,
    /// A matrix that is first used whole, then split, or the other way round.
    Tied(bool),
    /// Query, key and value projections with this many key heads for 4 query heads.
    Attention(usize),
    /// One projection for all three, with two key heads.
    FusedAttention,
}

fn links() -> impl Strategy<Value = Vec<Link>> {
    let link = prop_oneof![
        Just(Link::Mlp(Activation::GeluTanh, true)),
        Just(Link::Mlp(Activation::Tanh, false)),
        Just(Link::Column),
        Just(Link::Row),
        Just(Link::Plain),
        Just(Link::Norm),
        Just(Link::Gated),
        Just(Link::Fused),
        Just(Link::Dropout),
        Just(Link::Scale),
        Just(Link::Positions),
        Just(Link::Scores),
        Just(Link::HeadNorm),
        any::<bool>().prop_map(Link::Tied),
        prop_oneof![Just(1), Just(2), Just(4)].prop_map(Link::Attention),
        Just(Link::FusedAttention),
    ];
    proptest::collection::vec(link, 1..7)
}

impl Link {
    fn add(self, module: &Module, x: &Symbol) -> Result<Symbol> {
        let len = x.shape()[1];
        match self {
            Self::Mlp(activation, residual) => {
                let hidden = module.activation(&linear(module, "col", x, 16)?, activation)?;
                let y = linear(module, "row", &module.dropout(&hidden, 0.2)?, 8)?;
                if residual { module.add(&y, x) } else { Ok(y) }
            }
            Self::Column => linear(module, "col", x, 8),
            Self::Row => linear(module, "row", x, 8),
            Self::Plain => linear(module, "plain", x, 8),
            Self::Norm => module.sub("norm").layer_norm(x, 1e-5),
            Self::Gated => {
                let gate = linear(module, "col.gate", x, 8)?;
                let hidden = module.silu_mul(&gate, &linear(module, "col.up", x, 8)?)?;
                linear(module, "row", &hidden, 8)
            }
            Self::Fused => {
                let pieces = module.split(&linear(module, "col", x, 20)?, 2, &[4, 8, 8])?;
                let product = module.mul(&pieces[1], &pieces[2])?;
                let joined = apply(module, Op::Concat { dim: 2 }, &[&product, &pieces[0]])?;
                linear(module, "row", &joined, 8)
            }
            Self::Dropout => module.dropout(x, 0.3),
            Self::Scale => apply(module, Op::Scale { factor: 0.7 }, &[x]),
            Self::Positions => {
                let rows = module.reshape(x, &[2 * len, 8])?;
                let turned = turn(module, &module.reshape(&rows, &[2, len, 8])?)?;
                turn(module, &apply(module, Op::Softmax, &[&turned])?)
            }
            Self::Scores => scores(module, x),
            Self::HeadNorm => {
                let heads = module.reshape(&linear(module, "col", x, 16)?, &[2, len, 4, 4])?;
                let heads = module.sub("norm").rms_norm(&heads, 1e-5)?;
                let shift = module.param("shift", &[4], Init::Constant(0.0), ParamRole::Bias)?;
                let heads = linear(module, "plain", &module.add(&heads, &shift)?, 4)?;
                linear(module, "row", &module.reshape(&heads, &[2, len, 16])?, 8)
            }
            Self::Tied(whole_first) => tied_layers(module, x, whole_first),
            Self::Attention(kv_heads) => separate_attention(module, x, kv_heads),
            Self::FusedAttention => {
                let pieces = module.split(&linear(module, "col", x, 16)?, 2, &[8, 4, 4])?;
                module.attention(&pieces[0], &pieces[1], &pieces[2], &heads(2), 0.2)
            }
        }
    }
}

/// A product with itself on both sides, as attention without heads has it.
fn scores(module: &Module, x: &Symbol) -> Result<Symbol> {
    let op = |transpose_b: bool| Op::MatMul {
        transpose_a: !transpose_b,
        transpose_b,
    };
    let scores = apply(module, op(true), &[x, x])?;
    let scores = apply(module, Op::Softmax, &[&scores])?;
    apply(module, op(false), &[&scores, x])
}

/// Two layers with one weight, of which the lists split one.
fn tied_layers(module: &Module, x: &Symbol, whole_first: bool) -> Result<Symbol> {
    let weight = module.param("weight", &[8, 8], Init::Normal(0.5), ParamRole::Weight)?;
    let names = if whole_first {
        ["plain", "col"]
    } else {
        ["col", "plain"]
    };
    let [first, second] = names.map(|name| module.sub(name));
    let hidden = first.linear_with(x, &weight, WeightLayout::OutIn)?;
    second.linear_with(&hidden, &weight, WeightLayout::OutIn)
}

fn separate_attention(module: &Module, x: &Symbol, kv_heads: usize) -> Result<Symbol> {
    let rope = Rope {
        head_dim: 2,
        inv_freq: vec![0.5],
        scale: 1.0,
        inverse: false,
    };
    let positions = module.positions(x.shape()[1])?;
    let q = module.rope(&linear(module, "col.q", x, 8)?, &positions, rope.clone())?;
    let k = module.rope(&linear(module, "col.k", x, 2 * kv_heads)?, &positions, rope)?;
    let v = linear(module, "col.v", x, 2 * kv_heads)?;
    linear(
        module,
        "row",
        &module.attention(&q, &k, &v, &heads(kv_heads), 0.2)?,
        8,
    )
}

fn turn(module: &Module, x: &Symbol) -> Result<Symbol> {
    apply(
        module,
        Op::Transpose {
            perm: vec![0, 2, 1],
        },
        &[x],
    )
}

fn heads(kv_heads: usize) -> Attention {
    Attention {
        heads: 4,
        kv_heads,
        head_dim: 2,
        scale: 0.7,
        causal: true,
        ..Attention::default()
    }
}

/// A chain of links from looked up tokens to a sum of weighted elements, for texts of `len` tokens.
fn chain(links: &[Link], len: usize) -> Graph {
    let model = |module: &Module| {
        let ids = module.input("ids", TensorType::new([2, len], DType::I64));
        let table = module.sub("table");
        let (x, _) = table.embedding(&ids, 101, 8, Init::Normal(0.5))?;
        let mut x = linear(module, "first.plain", &x, 8)?;
        for (index, link) in links.iter().enumerate() {
            x = link.add(&module.sub(&format!("{index}")), &x)?;
        }
        // Something to split in every chain.
        let x = Link::Mlp(Activation::GeluErf, false).add(&module.sub("last"), &x)?;
        let weighted = module.mul(&x, &module.input("weights", x.ty().clone()))?;
        module.output("loss", &apply(module, Op::SumAll, &[&weighted])?);
        Ok(())
    };
    fx::trace(DType::F64, model).expect("the operands fit")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_chain_computes_on_many_ranks_what_it_does_on_one(links in links(), degree in prop_oneof![Just(2), Just(4)]) {
        let whole = chain(&links, 3);
        let split = rewrite(&whole, &lists(), degree).expect("all sizes are multiples of 4");
        assert_same(&whole, &split.graph, degree);
    }
}

/// How the ranks of both axes share a chain: the ranks of a tensor, whether these cut the sequence,
/// the ranks of a sequence, and how they share attentions.
fn shares() -> impl Strategy<Value = (usize, bool, usize, SequenceMethod)> {
    let ranks = prop_oneof![
        Just((2, true, 1)),
        Just((4, true, 1)),
        Just((1, false, 2)),
        Just((2, false, 2)),
        Just((2, true, 2)),
    ];
    let method = prop_oneof![
        Just(SequenceMethod::Ulysses),
        Just(SequenceMethod::AllGather),
        Just(SequenceMethod::Ring),
    ];
    (ranks, method).prop_map(|((tp, cuts, sp), method)| (tp, cuts, sp, method))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_chain_of_slices_computes_what_one_rank_does((tp, cuts, sp, method) in shares(), links in links()) {
        let cut = Sequence::Cut { dim: 1 };
        let whole = chain(&links, 8);
        let tensor = Options::new(tp).with_lists(lists());
        let tensor = if cuts { tensor.with_sequence(cut) } else { tensor };
        let by_layers = rewrite_with(&whole, &tensor).expect("all sizes are multiples of 4").graph;
        let degrees = Degrees { tp, sp, ..Degrees::default() };
        match rewrite_with(&by_layers, &Options::along_sequence(sp, cut, method)) {
            Ok(split) => assert_same_on(&whole, &split.graph, degrees),
            // A link that mixes positions leaves whole sequences behind it.
            Err(Error::WholeSequence { .. }) => {
                prop_assert!(links.iter().any(|link| matches!(link, Link::Positions)));
            }
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        }
    }
}
