//! Vision transformer ([Dosovitskiy et al. 2020](https://arxiv.org/abs/2010.11929)): a pre-norm encoder of image
//! patches that classifies images.

use super::{
    Model, ModelInfo, Objective, TraceOptions,
    causal::finish_with,
    fields::{Fields, error, head_dim},
};
use crate::{
    Graph, Init, Op, ParamRole, Result, TensorType,
    fx::{self, Module, Symbol},
    op::{Activation, Attention, WeightLayout},
};

/// The configuration of a vision transformer.
#[derive(Debug, Clone, PartialEq)]
pub struct Vit {
    hidden_size: usize,
    num_layers: usize,
    num_heads: usize,
    intermediate_size: usize,
    activation: Activation,
    hidden_dropout: f64,
    attention_dropout: f64,
    layer_norm_eps: f64,
    /// Height and width.
    image: [usize; 2],
    patch: [usize; 2],
    num_channels: usize,
    qkv_bias: bool,
    num_labels: usize,
    initializer_range: Option<f64>,
}

impl Vit {
    /// Reads the configuration of a `ViTForImageClassification`; absent fields have the defaults of
    /// `transformers`.
    pub(super) fn from_fields(f: &Fields<'_>) -> Result<Self> {
        f.architecture(&["ViTForImageClassification"])?;
        // Of the decoder of masked images and of the pooler, which the classifier does without.
        f.ignore(&["encoder_stride", "pooler_output_size", "pooler_act"]);
        let hidden_size = f.size_or("hidden_size", 768)?;
        let num_heads = f.size_or("num_attention_heads", 12)?;
        head_dim(hidden_size, num_heads, "num_attention_heads")?;
        let (image, patch) = (f.pair_or("image_size", 224)?, f.pair_or("patch_size", 16)?);
        if image[0] < patch[0] || image[1] < patch[1] {
            let reason = format!("is {patch:?}, larger than the image {image:?}");
            return Err(error("patch_size", &reason));
        }
        Ok(Self {
            hidden_size,
            num_layers: f.size_or("num_hidden_layers", 12)?,
            num_heads,
            intermediate_size: f.size_or("intermediate_size", 3072)?,
            activation: f.activation("hidden_act", "gelu")?,
            hidden_dropout: f.probability("hidden_dropout_prob", 0.0)?,
            attention_dropout: f.probability("attention_probs_dropout_prob", 0.0)?,
            layer_norm_eps: f.number_or("layer_norm_eps", 1e-12)?,
            image,
            patch,
            num_channels: f.size_or("num_channels", 3)?,
            qkv_bias: f.flag_or("qkv_bias", true)?,
            num_labels: f.num_labels()?,
            initializer_range: f.opt_number("initializer_range")?,
        })
    }

    /// Patches per column and row of an image.
    fn grid(&self) -> [usize; 2] {
        [self.image[0] / self.patch[0], self.image[1] / self.patch[1]]
    }

    /// Positions of a sequence: the class token and every patch.
    fn seq(&self) -> usize {
        1 + self.grid()[0] * self.grid()[1]
    }

    /// The convolution whose kernel is as large as its stride, as a linear layer of unfolded patches:
    /// `[B, C, H, W] -> [B, patches, width]`.
    fn patches(&self, module: &Module, pixels: &Symbol, init: Init) -> Result<Symbol> {
        let (batch, channels) = (pixels.shape()[0], self.num_channels);
        let ([rows, cols], [height, width]) = (self.grid(), self.patch);
        let size = channels * height * width;
        // Pixels that make no whole patch are left out.
        let pixels = crop(module, pixels, 2, rows * height)?;
        let pixels = crop(module, &pixels, 3, cols * width)?;
        let cut = module.reshape(&pixels, &[batch, channels, rows, height, cols, width])?;
        let cut = module.transpose(&cut, &[0, 2, 4, 1, 3, 5])?;
        let cut = module.reshape(&cut, &[batch, rows * cols, size])?;
        let shape = [self.hidden_size, channels, height, width];
        let weight = module.param("weight", &shape, init, ParamRole::Weight)?;
        let bias = [self.hidden_size];
        let bias = module.param("bias", &bias, Init::Constant(0.0), ParamRole::Bias)?;
        let weight = module.reshape(&weight, &[self.hidden_size, size])?;
        let op = Op::Linear {
            layout: WeightLayout::OutIn,
            bias: true,
        };
        Ok(module.apply(op, &[&cut, &weight, &bias])?.swap_remove(0))
    }

    /// The class token before the patches, all with their positions.
    fn embeddings(&self, module: &Module, pixels: &Symbol, init: Init) -> Result<Symbol> {
        let width = self.hidden_size;
        let class = module.param("cls_token", &[1, 1, width], init, ParamRole::Embedding)?;
        let positions = module.param(
            "position_embeddings",
            &[1, self.seq(), width],
            init,
            ParamRole::Embedding,
        )?;
        let patches = self.patches(&module.sub("patch_embeddings.projection"), pixels, init)?;
        let class = module.reshape(&class, &[1, width])?;
        let class = module.repeated(&class, &[pixels.shape()[0], 1, width])?;
        let x = module.concat(&[&class, &patches], 1)?;
        let positions = module.reshape(&positions, &[self.seq(), width])?;
        module.dropout(&module.add(&x, &positions)?, self.hidden_dropout)
    }

    fn layer(&self, layer: &Module, x: &Symbol, init: Init) -> Result<Symbol> {
        let linear = |module: &Module, x: &Symbol, out, bias| {
            module.linear(x, out, WeightLayout::OutIn, bias, init)
        };
        let width = self.hidden_size;
        let normed = layer
            .sub("layernorm_before")
            .layer_norm(x, self.layer_norm_eps)?;
        let attn = layer.sub("attention.attention");
        let [q, k, v] = ["query", "key", "value"]
            .map(|name| linear(&attn.sub(name), &normed, width, self.qkv_bias));
        let head_dim = width / self.num_heads;
        let spec = Attention {
            heads: self.num_heads,
            kv_heads: self.num_heads,
            head_dim,
            scale: 1.0 / (head_dim as f64).sqrt(),
            causal: false,
            window: None,
            dropout: None,
        };
        let mixed = attn.attention(&q?, &k?, &v?, &spec, self.attention_dropout)?;
        let output = layer.sub("attention.output");
        let mixed = linear(&output.sub("dense"), &mixed, width, true)?;
        let x = layer.add(&output.dropout(&mixed, self.hidden_dropout)?, x)?;

        let normed = layer
            .sub("layernorm_after")
            .layer_norm(&x, self.layer_norm_eps)?;
        let intermediate = layer.sub("intermediate");
        let hidden = linear(
            &intermediate.sub("dense"),
            &normed,
            self.intermediate_size,
            true,
        )?;
        let hidden = intermediate.activation(&hidden, self.activation)?;
        let output = layer.sub("output");
        let hidden = linear(&output.sub("dense"), &hidden, width, true)?;
        layer.add(&output.dropout(&hidden, self.hidden_dropout)?, &x)
    }
}

impl Model for Vit {
    fn info(&self) -> ModelInfo {
        ModelInfo {
            family: "vit",
            num_layers: self.num_layers,
            hidden_size: self.hidden_size,
            num_heads: self.num_heads,
            num_kv_heads: self.num_heads,
            max_seq: self.seq(),
            vocab_size: self.num_labels,
            eos_token_id: None,
        }
    }

    fn objective(&self) -> Objective {
        Objective::ImageClassification
    }

    /// Inputs are `pixel_values: [B, C, H, W]` and, for a loss, `labels: [B] i64`.
    fn trace(&self, options: &TraceOptions) -> Result<Graph> {
        if options.seq != self.seq() {
            let reason = format!(
                "makes sequences of {}, the class token and {} patches, not of {}",
                self.seq(),
                self.seq() - 1,
                options.seq
            );
            return Err(error("image_size", &reason));
        }
        let init = Init::Normal(self.initializer_range.unwrap_or(options.init_std));
        fx::trace(options.dtype, |root| {
            let [height, width] = self.image;
            let shape = [options.batch, self.num_channels, height, width];
            let pixels = root.input("pixel_values", TensorType::new(shape, options.dtype));
            let vit = root.sub("vit");
            let mut x = self.embeddings(&vit.sub("embeddings"), &pixels, init)?;
            for index in 0..self.num_layers {
                x = self.layer(&vit.sub(&format!("encoder.layer.{index}")), &x, init)?;
            }
            let x = vit.sub("layernorm").layer_norm(&x, self.layer_norm_eps)?;
            let classifier = root.sub("classifier");
            let first = classifier.first(&x)?;
            let layout = WeightLayout::OutIn;
            let logits = classifier.linear(&first, self.num_labels, layout, true, init)?;
            finish_with(root, &logits, &[options.batch], options)
        })
    }
}

/// The first `len` elements along `dim`.
fn crop(module: &Module, x: &Symbol, dim: usize, len: usize) -> Result<Symbol> {
    let all = x.shape()[dim];
    if all == len {
        return Ok(x.clone());
    }
    Ok(module.split(x, dim, &[len, all - len])?.swap_remove(0))
}
