//! Vision transformer ([Dosovitskiy et al. 2020](https://arxiv.org/abs/2010.11929)): a pre-norm
//! encoder of image patches that classifies images.

use super::{
    Deviations, Model, ModelInfo, Objective, TraceOptions,
    causal::finish_with,
    encoder::{Encoder, SPLIT_LAYERS, linear},
    family::{Family, USUAL_SIZES},
    fields::{Fields, error},
};
use crate::{
    Graph, Init, Op, ParamRole, Result, TensorType,
    fx::{self, Module, Symbol},
    op::WeightLayout,
};

/// Its classes.
const CLASSES: &[&str] = &["ViTForImageClassification"];

/// The facts of the family.
pub(super) const FAMILY: Family = Family {
    split_layers: SPLIT_LAYERS,
    split_points: &["vit.encoder.layer.{i}", "vit.layernorm"],
    adapter_targets: &["query", "value"],
    classifier: &["classifier"],
    ..Family::traced(&["vit"], CLASSES, USUAL_SIZES, |f| {
        Ok(Box::new(Vit::from_fields(f)?))
    })
};

/// The configuration of a vision transformer.
#[derive(Debug, Clone, PartialEq)]
pub struct Vit {
    encoder: Encoder,
    /// Height and width.
    image: [usize; 2],
    patch: [usize; 2],
    num_channels: usize,
    qkv_bias: bool,
    num_labels: usize,
}

impl Vit {
    /// Reads the configuration of a `ViTForImageClassification`; absent fields have the defaults of
    /// `transformers`.
    fn from_fields(f: &Fields<'_>) -> Result<Self> {
        f.architecture(CLASSES)?;
        // Fields of the decoder of masked images, of the pooler, which the classifier lacks, and of
        // words.
        f.ignore(&[
            "encoder_stride",
            "pooler_output_size",
            "pooler_act",
            "tie_word_embeddings",
        ]);
        let encoder = Encoder::from_fields(f, 0.0)?;
        let (image, patch) = (f.pair_or("image_size", 224)?, f.pair_or("patch_size", 16)?);
        if image[0] < patch[0] || image[1] < patch[1] {
            let reason = format!("is {patch:?}, larger than the image {image:?}");
            return Err(error("patch_size", &reason));
        }
        Ok(Self {
            encoder,
            image,
            patch,
            num_channels: f.size_or("num_channels", 3)?,
            qkv_bias: f.flag_or("qkv_bias", true)?,
            num_labels: f.num_labels()?,
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

    /// The convolution whose kernel is as large as its stride, as a linear layer of unfolded
    /// patches: `[B, C, H, W] -> [B, patches, width]`.
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
        let hidden_size = self.encoder.hidden_size;
        let shape = [hidden_size, channels, height, width];
        let weight = module.param("weight", &shape, init, ParamRole::Weight)?;
        let bias = [hidden_size];
        let bias = module.param("bias", &bias, Init::Constant(0.0), ParamRole::Bias)?;
        let weight = module.reshape(&weight, &[hidden_size, size])?;
        let op = Op::Linear {
            layout: WeightLayout::OutIn,
            bias: true,
        };
        Ok(module.apply(op, &[&cut, &weight, &bias])?.swap_remove(0))
    }

    /// The class token before the patches, all with their positions.
    fn embeddings(&self, module: &Module, pixels: &Symbol, init: Init) -> Result<Symbol> {
        let width = self.encoder.hidden_size;
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
        module.dropout(&module.add(&x, &positions)?, self.encoder.hidden_dropout)
    }

    /// A layer, whose norms come before the parts.
    fn layer(&self, layer: &Module, x: &Symbol, std: Deviations) -> Result<Symbol> {
        let encoder = &self.encoder;
        let normed = encoder.norm(&layer.sub("layernorm_before"), x)?;
        let attn = layer.sub("attention.attention");
        let mixed = encoder.attention(&attn, &normed, None, (self.qkv_bias, std))?;
        let mixed = encoder.narrow(&layer.sub("attention.output"), &mixed, std)?;
        let x = layer.add(&mixed, x)?;
        let normed = encoder.norm(&layer.sub("layernorm_after"), &x)?;
        layer.add(&encoder.feed_forward(layer, &normed, std)?, &x)
    }
}

impl Model for Vit {
    fn info(&self) -> ModelInfo {
        self.encoder.info("vit", self.seq(), self.num_labels)
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
        let std = self.encoder.deviations(options);
        let init = Init::Normal(std.inner);
        fx::trace(options.dtype, |root| {
            let [height, width] = self.image;
            let shape = [options.batch, self.num_channels, height, width];
            let pixels = root.input("pixel_values", TensorType::new(shape, options.dtype));
            let vit = root.sub("vit");
            let mut x = self.embeddings(&vit.sub("embeddings"), &pixels, init)?;
            for index in 0..self.encoder.num_layers {
                x = self.layer(&vit.sub(&format!("encoder.layer.{index}")), &x, std)?;
            }
            let x = self.encoder.norm(&vit.sub("layernorm"), &x)?;
            let classifier = root.sub("classifier");
            let first = classifier.first(&x)?;
            let logits = linear(&classifier, &first, self.num_labels, init)?;
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
