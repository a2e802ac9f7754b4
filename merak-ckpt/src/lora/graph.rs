//! Adapters in the graph of a model: a pass before any rank gets its part.
//!
//! ```text
//!        ┌──────────── layer ────────────┐
//!   x ───┤                               + ──► y
//!        └─ dropout ─► A ─► B ─► scale ──┘
//! ```
//!
//! The factors are ordinary parameters and their products ordinary nodes, so later passes (tensor
//! parallelism, the cut into stages, gradients) know nothing of adapters except that a factor lies
//! as its layer does.

use super::LoraConfig;
use super::config::{InitWeights, Names, ends_with};
use super::unmatched::{UnmatchedTarget, all_linear_hint};
use crate::factor_name::{FactorRole, dropout_module};
use merak_trace::fx::{Copied, Module, Symbol, extend};
use merak_trace::op::{Class, WeightLayout};
use merak_trace::{Beside, DType, Graph, Init, Node, Op, Param, ParamRole, models};
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A model with an adapter.
#[derive(Debug, Clone)]
pub struct Adapted {
    /// The model's graph with the adapter in it; everything that the adapter does not train is
    /// frozen.
    pub graph: Graph,
    /// The configuration, with the targets that were left to the model's family.
    pub config: LoraConfig,
    /// The layers that have an adapter, in the order of the graph.
    pub modules: Vec<String>,
    /// The names in a list of targets that no layer has.
    pub unmatched: Vec<UnmatchedTarget>,
}

/// Why a model cannot get an adapter.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdaptError {
    /// A name that cannot be part of a parameter's name.
    #[error("the adapter's name is \"{name}\", expected {ADAPTER_NAMES}")]
    Name {
        /// The name.
        name: String,
    },
    /// A family without default targets.
    #[error(
        "`target_modules` is not set, and there is no default for {model_type}: name the layers"
    )]
    NoDefault {
        /// The model's family.
        model_type: String,
    },
    /// No layer matches.
    #[error(
        "no layer is one of the `target_modules` {targets}: the model's layers are {layers}{hint}"
    )]
    NoTarget {
        /// What was asked for.
        targets: String,
        /// Ends of the names of the model's layers.
        layers: String,
        /// The end of the message: `all-linear`, where that was probably meant.
        hint: String,
    },
    /// Layers match, but another field takes them all out.
    #[error("`{field}` is {value}, which leaves none of the `target_modules` {targets}")]
    NoneLeft {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What was asked for.
        targets: String,
    },
    /// A target that can have no adapter.
    #[error(
        "`{module}` is one of the `target_modules`, but can have no adapter: the model's layers that can are {layers}"
    )]
    NoLayer {
        /// The module.
        module: String,
        /// Ends of the names of the model's layers.
        layers: String,
    },
    /// A tensor of several layers that is to be trained for one of them.
    #[error("`modules_to_save` has `{param}`, which {layers} share")]
    Shared {
        /// The tensor.
        param: String,
        /// The layers.
        layers: String,
    },
    /// A module that is to be trained whole, but has no parameter.
    #[error("no parameter that can be saved whole belongs to `{module}` of `modules_to_save`")]
    NoModule {
        /// What was asked for.
        module: String,
    },
    /// A table with a magnitude for each feature.
    #[error("`use_dora` is true, which is not supported for the table {module}")]
    Magnitudes {
        /// The table.
        module: String,
    },
    /// A way to start factors that needs the base weights.
    #[error(
        "`init_lora_weights` is \"{init}\", expected true, false or gaussian for a new adapter"
    )]
    Init {
        /// The way.
        init: String,
    },
    /// The graph does not take the nodes.
    #[error(transparent)]
    Graph(#[from] merak_trace::Error),
}

/// Puts an adapter into the graph of a model: for each target layer `y = W x`,
/// `y + scale * B(A(dropout(x)))`, and for each target table the same without dropout ([Hu et al.
/// 2021](https://arxiv.org/abs/2106.09685), section 4.1). A linear layer whose matrix is a reshaped
/// kernel is a convolution, and its factors have PEFT's shapes for one.
///
/// `name` is the adapter's, and part of the names of its parameters, as in PEFT
/// (`h.0.attn.c_attn.lora_A.default.weight`); `model_type` decides the targets where the
/// configuration names none. In a 16-bit model the factors are `f32`, and so is the arithmetic on
/// them.
///
/// # Shapes
/// Layer `x: [.., in]`, `y: [.., out]`: A `[r, in]`, B `[out, r]`. Table `[rows, width]`: A
/// `[r, rows]`, B `[width, r]`. Convolution of kernel `[out, c, h, w]`: A `[r, c, h, w]`, B
/// `[out, r, 1, 1]`.
///
/// # Errors
/// When no layer is a target, or the configuration cannot be trained.
pub fn adapt(
    graph: &Graph,
    config: &LoraConfig,
    name: &str,
    model_type: &str,
) -> Result<Adapted, AdaptError> {
    check_name(name)?;
    if let InitWeights::Other(init) = &config.init {
        let init = init.clone();
        return Err(AdaptError::Init { init });
    }
    let layers = layers(graph);
    let names = names(&layers, no_layers(model_type));
    // Not every model of a family has all of its default targets.
    let unmatched = UnmatchedTarget::all(config.targets.as_ref(), &names);
    let config = with_defaults(config, model_type)?;
    let chosen: Vec<_> = layers
        .iter()
        .filter(|layer| is_target(&config, layer))
        .collect();
    check_targets(graph, &config, &layers, no_layers(model_type))?;
    if let Some(table) = chosen
        .iter()
        .find(|layer| config.use_dora && layer.weight_use == WeightUse::Table)
    {
        let module = table.module.clone();
        return Err(AdaptError::Magnitudes { module });
    }
    let mut modules: Vec<String> = Vec::new();
    for layer in &chosen {
        if !modules.contains(&layer.module) {
            modules.push(layer.module.clone());
        }
    }
    let adapter = Adapter {
        config: &config,
        name,
    };
    let is_adapted = |module: &str| modules.iter().any(|adapted| adapted == module);
    check_whole(graph, &config, &layers, is_adapted)?;
    check_saved(graph, &config, no_layers(model_type))?;
    let extended = extend(
        graph,
        |param| {
            let trains = config.trains_whole(&param.name, is_adapted);
            param.trainable = trains && !config.is_frozen;
        },
        |original| {
            let copied = original.copy()?;
            let layer = chosen.iter().find(|layer| layer.node == copied.node.name);
            match layer {
                Some(layer) => adapter.beside(layer, &copied).map(|value| vec![value]),
                None => Ok(copied.outputs),
            }
        },
    )?;
    Ok(Adapted {
        graph: extended,
        config: written(&config, &chosen, &layers, &modules),
        modules,
        unmatched,
    })
}

/// A layer that an adapter may stand beside.
struct Layer<'a> {
    node: Arc<str>,
    module: String,
    weight: &'a Param,
    weight_use: WeightUse,
    is_head: bool,
}

/// How a layer uses its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WeightUse {
    /// A matrix to multiply with, stored `[out, in]` or `[in, out]`.
    Matrix(WeightLayout),
    /// A kernel `[out, c, h, w]`, reshaped to the matrix `[out, c * h * w]` that unfolded patches
    /// are multiplied with.
    Kernel,
    /// `[rows, width]`, to look rows up in.
    Table,
}

impl WeightUse {
    fn of(graph: &Graph, node: &Node, weight: &Param) -> Option<Self> {
        let is_as_stored = graph.param_of(*node.inputs.get(1)?).is_some();
        match node.op.class() {
            Class::Linear(layout) if is_as_stored => Some(Self::Matrix(layout)),
            Class::Linear(layout) => {
                let is_kernel = layout == WeightLayout::OutIn && weight.full.ndim() == 4;
                is_kernel.then_some(Self::Kernel)
            }
            Class::Lookup if is_as_stored => Some(Self::Table),
            _ => None,
        }
    }

    /// Where inputs and outputs are among the dims of the weight, or of the matrix that it is used
    /// as.
    fn layout(self) -> WeightLayout {
        match self {
            Self::Matrix(layout) => layout,
            Self::Kernel => WeightLayout::OutIn,
            Self::Table => WeightLayout::InOut,
        }
    }
}

fn layers(graph: &Graph) -> Vec<Layer<'_>> {
    let users = graph.users();
    let layer = |node: &Node| {
        let weight = graph.param(graph.weight_of(node)?);
        let weight_use = WeightUse::of(graph, node, weight)?;
        Some(Layer {
            node: Arc::clone(&node.name),
            module: node.scope.to_string(),
            weight,
            weight_use,
            is_head: weight_use != WeightUse::Table && graph.is_head(&users, node),
        })
    };
    graph.nodes().iter().filter_map(layer).collect()
}

fn is_target(config: &LoraConfig, layer: &Layer<'_>) -> bool {
    is_named(config, layer) && config.obstacle(&layer.module).is_none()
}

fn is_named(config: &LoraConfig, layer: &Layer<'_>) -> bool {
    let is_by_name = !matches!(config.targets, Some(Names::AllLinear));
    // As in PEFT, a convolution is no linear layer.
    let is_linear = matches!(layer.weight_use, WeightUse::Matrix(_));
    config.names(&layer.module) && (is_by_name || is_linear && !layer.is_head)
}

fn no_layers(model_type: &str) -> &'static [&'static str] {
    models::family(model_type).map_or(&[], |family| family.without_adapter)
}

/// The names of the layers that can have an adapter.
fn names<'a>(layers: &'a [Layer<'_>], no_layers: &[&str]) -> Vec<&'a str> {
    let names = layers.iter().map(|layer| layer.module.as_str());
    names.filter(|name| !no_layers.contains(name)).collect()
}

/// Checks that there are targets, and that every named module can be one.
fn check_targets(
    graph: &Graph,
    config: &LoraConfig,
    layers: &[Layer<'_>],
    no_layers: &[&str],
) -> Result<(), AdaptError> {
    let names = names(layers, no_layers);
    let ends = names.iter().filter_map(|name| name.rsplit('.').next());
    let ends: BTreeSet<_> = ends.collect();
    let ends = ends.into_iter().collect::<Vec<_>>().join(", ");
    let is_layer = |module: &str| names.contains(&module);
    let modules = graph.params().iter();
    let modules = modules.filter_map(|param| param.name.strip_suffix(".weight"));
    let mut modules = modules.chain(no_layers.iter().copied());
    if let Some(module) = modules.find(|name| config.is_target(name) && !is_layer(name)) {
        return Err(AdaptError::NoLayer {
            module: module.to_owned(),
            layers: ends,
        });
    }
    if layers.iter().any(|layer| is_target(config, layer)) {
        return Ok(());
    }
    let json = config.to_json();
    let targets = json["target_modules"].to_string();
    let named = layers.iter().find(|layer| is_named(config, layer));
    Err(
        match named.and_then(|layer| config.obstacle(&layer.module)) {
            Some(field) => AdaptError::NoneLeft {
                field,
                value: json[field].to_string(),
                targets,
            },
            None => AdaptError::NoTarget {
                targets,
                layers: ends,
                hint: all_linear_hint(&json["target_modules"]),
            },
        },
    )
}

/// What an adapter's name may be, in words.
pub const ADAPTER_NAMES: &str = "1 to 100 letters, digits, `-` and `_` that are no name of an adapter's own parts, such as `weight` and `lora_A`";

/// Whether an adapter may have this name, which becomes part of the names of tensors and of a
/// folder; [`ADAPTER_NAMES`] says which may be.
pub fn is_adapter_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_');
    let is_of_parts = name == "weight" || FactorRole::is_name(name);
    (1..=100).contains(&name.len()) && name.chars().all(is_plain) && !is_of_parts
}

fn check_name(name: &str) -> Result<(), AdaptError> {
    if is_adapter_name(name) {
        return Ok(());
    }
    let name = name.to_owned();
    Err(AdaptError::Name { name })
}

/// Checks that each module that is to be trained whole has a parameter, and is none of the
/// `no_layers` of the family.
fn check_saved(graph: &Graph, config: &LoraConfig, no_layers: &[&str]) -> Result<(), AdaptError> {
    let params = graph.params().iter().map(|param| param.name.as_str());
    let lacking = config.saved_without(&params.collect::<Vec<_>>());
    let mut unknown = no_layers.iter().copied();
    match lacking.or_else(|| unknown.find(|module| config.saves(module))) {
        Some(module) => Err(AdaptError::NoModule {
            module: module.to_owned(),
        }),
        None => Ok(()),
    }
}

/// Checks that each tensor that is trained whole belongs to one layer: PEFT trains a copy for the
/// named module.
fn check_whole(
    graph: &Graph,
    config: &LoraConfig,
    layers: &[Layer<'_>],
    is_adapted: impl Fn(&str) -> bool,
) -> Result<(), AdaptError> {
    for param in graph.params() {
        let users = layers
            .iter()
            .filter(|layer| layer.weight.name == param.name);
        let users: BTreeSet<_> = users.map(|layer| layer.module.as_str()).collect();
        let is_saved = users.iter().any(|user| config.saves(user))
            || config.trains_whole(&param.name, &is_adapted);
        if users.len() > 1 && is_saved {
            return Err(AdaptError::Shared {
                param: param.name.clone(),
                layers: users.into_iter().collect::<Vec<_>>().join(" and "),
            });
        }
    }
    Ok(())
}

fn with_defaults(config: &LoraConfig, model_type: &str) -> Result<LoraConfig, AdaptError> {
    if config.targets.is_some() {
        return Ok(config.clone());
    }
    let targets = models::family(model_type).map_or(&[][..], |family| family.adapter_targets);
    if targets.is_empty() {
        let model_type = model_type.to_owned();
        return Err(AdaptError::NoDefault { model_type });
    }
    Ok(config
        .with("target_modules", json!(targets))
        .expect("a list of names is legal"))
}

/// The configuration from which PEFT makes the same adapter.
fn written(
    config: &LoraConfig,
    chosen: &[&Layer<'_>],
    layers: &[Layer<'_>],
    modules: &[String],
) -> LoraConfig {
    let mut written = config.clone();
    if matches!(config.targets, Some(Names::AllLinear)) {
        let ends: BTreeSet<_> = modules
            .iter()
            .map(|module| module.rsplit('.').next().unwrap_or_default())
            .collect();
        let is_same = layers.iter().all(|layer| {
            let is_named = ends.iter().any(|end| ends_with(&layer.module, end));
            is_named == modules.contains(&layer.module)
        });
        let targets = if is_same { json!(ends) } else { json!(modules) };
        written = written
            .with("target_modules", targets)
            .expect("a list of names is legal");
    }
    let is_transposed = chosen
        .iter()
        .any(|layer| layer.weight_use == WeightUse::Matrix(WeightLayout::InOut));
    written
        .with("fan_in_fan_out", json!(is_transposed))
        .expect("a flag is legal")
}

/// The adapter that is put beside each target.
struct Adapter<'a> {
    config: &'a LoraConfig,
    name: &'a str,
}

/// A factor that is to be declared.
struct Factor<'a> {
    role: FactorRole,
    shape: Vec<usize>,
    init: Init,
    /// The layer's weight, and the dims of factor and weight that hold the same features.
    shares: (&'a str, usize, usize),
}

/// The values that an adapter computes from a layer's input.
struct Update {
    /// `B A x`, before it is scaled.
    value: Symbol,
    factors: [Symbol; 2],
    /// The input after dropout.
    dropped: Symbol,
}

/// `1 / |V|` for each output of `V = W + scale * B A`.
fn inverse_norms(
    module: &Module,
    matrix: &Symbol,
    layout: WeightLayout,
    scale: f64,
    [a, b]: &[Symbol; 2],
) -> Result<Symbol, AdaptError> {
    let is_out_in = layout == WeightLayout::OutIn;
    let product = Op::MatMul {
        transpose_a: !is_out_in,
        transpose_b: !is_out_in,
    };
    let operands = if is_out_in { [b, a] } else { [a, b] };
    let product = module.apply(product, &operands)?.swap_remove(0);
    let product = module.scale(&product, scale)?;
    let matrix = module.cast(matrix, module.dtype())?;
    let whole = module.add(&product, &matrix)?;
    let mut squares = module.mul(&whole, &whole)?;
    if is_out_in {
        squares = module.transpose(&squares, &[1, 0])?;
    }
    let shape = vec![squares.shape()[1]];
    let sums = module.apply(Op::SumLeading { shape }, &[&squares])?;
    Ok(module.apply(Op::InverseRoot, &[&sums[0]])?.swap_remove(0))
}

/// `x` in another shape; adds no node where it has that shape.
fn reshaped(module: &Module, x: &Symbol, shape: &[usize]) -> Result<Symbol, AdaptError> {
    if x.shape() == shape {
        return Ok(x.clone());
    }
    Ok(module.reshape(x, shape)?)
}

impl Adapter<'_> {
    /// The layer's result with the update added to it.
    fn beside(&self, layer: &Layer<'_>, copied: &Copied<'_>) -> Result<Symbol, AdaptError> {
        let (module, base) = (&copied.module, &copied.outputs[0]);
        let rank = self.config.rank(module.path());
        let scale = self.config.scale(module.path(), rank);
        let dtype = match module.dtype() {
            DType::BF16 | DType::F16 => DType::F32,
            dtype => dtype,
        };
        let wide = module.with_dtype(dtype);
        let update = if layer.weight_use == WeightUse::Table {
            self.of_embedding(&wide, copied, rank, layer)?
        } else {
            let update = self.of_linear(&wide, copied, rank, layer)?;
            if self.config.use_dora {
                return self.decomposed(&wide, copied, layer, scale, &update);
            }
            update.value
        };
        let update = wide.scale(&update, scale)?;
        // Rounded once, as in PEFT: of a 16-bit layer's result only the sum is 16 bits wide again.
        let sum = wide.add(&wide.cast(base, dtype)?, &update)?;
        Ok(wide.cast(&sum, base.ty().dtype)?)
    }

    fn of_linear(
        &self,
        module: &Module,
        copied: &Copied<'_>,
        rank: usize,
        layer: &Layer<'_>,
    ) -> Result<Update, AdaptError> {
        let (x, base) = (&copied.inputs[0], &copied.outputs[0]);
        let (inputs, outputs) = (x.ty().last_dim(), base.ty().last_dim());
        let dropout = module.sub(&dropout_module(self.name));
        let wide = dropout.cast(x, module.dtype())?;
        let dropped = dropout.dropout(&wide, self.config.dropout)?;
        let of_inputs = 1.0 / (inputs as f64).sqrt();
        let (first, second) = match self.config.init {
            InitWeights::Gaussian => (Init::Normal(1.0 / rank as f64), Init::Constant(0.0)),
            InitWeights::Random => (
                Init::Uniform(of_inputs),
                Init::Uniform(1.0 / (rank as f64).sqrt()),
            ),
            _ => (Init::Uniform(of_inputs), Init::Constant(0.0)),
        };
        let (weight, layout) = (&layer.weight.full.shape, layer.weight_use.layout());
        // For a kernel, PEFT runs two convolutions in sequence, the second with a kernel of one
        // pixel.
        let (first_shape, second_shape) = match layer.weight_use {
            WeightUse::Kernel => ([&[rank], &weight[1..]].concat(), vec![outputs, rank, 1, 1]),
            _ => (vec![rank, inputs], vec![outputs, rank]),
        };
        let factor = |role, shape, init, (dim, of): (usize, usize)| {
            let factor = Factor {
                role,
                shape,
                init,
                shares: (&layer.weight.name, dim, of),
            };
            self.factor(module, &factor)
        };
        let half = |role: FactorRole| module.sub(&role.module(self.name));
        let (to_rank, from_rank) = (half(FactorRole::A), half(FactorRole::B));
        let a = factor(FactorRole::A, first_shape, first, (1, layout.in_dim()))?;
        let a = reshaped(&to_rank, &a, &[rank, inputs])?;
        let b = factor(FactorRole::B, second_shape, second, (0, layout.out_dim()))?;
        let b = reshaped(&from_rank, &b, &[outputs, rank])?;
        let low = to_rank.linear_with(&dropped, &a, WeightLayout::OutIn)?;
        let value = from_rank.linear_with(&low, &b, WeightLayout::OutIn)?;
        Ok(Update {
            value,
            factors: [a, b],
            dropped,
        })
    }

    /// The adapted layer with a magnitude of its own for each output ([Liu et al.
    /// 2024](https://arxiv.org/abs/2402.09353), equation 5): `m / |V| * V x` for
    /// `V = W + scale * B A`, where the norms of the rows of `V` are constants to the gradient
    /// (section 4.3).
    fn decomposed(
        &self,
        module: &Module,
        copied: &Copied<'_>,
        layer: &Layer<'_>,
        scale: f64,
        update: &Update,
    ) -> Result<Symbol, AdaptError> {
        let (matrix, base) = (&copied.inputs[1], &copied.outputs[0]);
        let (outputs, layout) = (base.ty().last_dim(), layer.weight_use.layout());
        let (shape, dim) = match layer.weight_use {
            WeightUse::Kernel => (vec![1, outputs, 1, 1], 1),
            _ => (vec![outputs], 0),
        };
        let magnitude = Factor {
            role: FactorRole::Magnitude,
            shape,
            init: Init::Constant(1.0),
            shares: (&layer.weight.name, dim, layout.out_dim()),
        };
        let own = module.sub(&magnitude.role.module(self.name));
        let magnitude = self.factor(module, &magnitude)?;
        let magnitude = reshaped(&own, &magnitude, &[outputs])?;
        let norms = inverse_norms(&own, matrix, layout, scale, &update.factors)?;
        let factor = own.mul(&magnitude, &norms)?;
        let low = module.scale(&update.value, scale)?;

        let has_dropout = self.config.dropout > 0.0;
        let wide_base = module.cast(base, module.dtype())?;
        let bias = copied
            .inputs
            .get(2)
            .map(|bias| module.cast(bias, module.dtype()));
        let bias = bias.transpose()?;
        let y = if has_dropout {
            // The layer's result `base` is of the input without dropout.
            let dropped = module.cast(&update.dropped, matrix.ty().dtype)?;
            let plain = module.linear_with(&dropped, matrix, layout)?;
            let plain = module.cast(&plain, module.dtype())?;
            let scaled = module.mul(&module.add(&low, &plain)?, &factor)?;
            let change = module.add(&scaled, &module.scale(&plain, -1.0)?)?;
            module.add(&wide_base, &change)?
        } else {
            let plain = match &bias {
                Some(bias) => module.add(&wide_base, &module.scale(bias, -1.0)?)?,
                None => wide_base,
            };
            let scaled = module.mul(&module.add(&plain, &low)?, &factor)?;
            match &bias {
                Some(bias) => module.add(&scaled, bias)?,
                None => scaled,
            }
        };
        Ok(module.cast(&y, base.ty().dtype)?)
    }

    fn of_embedding(
        &self,
        module: &Module,
        copied: &Copied<'_>,
        rank: usize,
        layer: &Layer<'_>,
    ) -> Result<Symbol, AdaptError> {
        let weight = &layer.weight.name;
        let (ids, table) = (&copied.inputs[0], &copied.inputs[1]);
        let (rows, width) = (table.shape()[0], table.shape()[1]);
        let first = match self.config.init {
            InitWeights::Random => Init::Normal(1.0),
            _ => Init::Constant(0.0),
        };
        let a = Factor {
            role: FactorRole::EmbeddingA,
            shape: vec![rank, rows],
            init: first,
            shares: (weight, 1, 0),
        };
        let b = Factor {
            role: FactorRole::EmbeddingB,
            shape: vec![width, rank],
            init: Init::Normal(1.0),
            shares: (weight, 0, 1),
        };
        let (a, b) = (self.factor(module, &a)?, self.factor(module, &b)?);
        let table = module.transpose(&a, &[1, 0])?;
        let looked_up = module.apply(copied.node.op.clone(), &[ids, &table])?;
        Ok(module.linear_with(&looked_up[0], &b, WeightLayout::OutIn)?)
    }

    /// Declares a factor beside a layer.
    fn factor(&self, module: &Module, factor: &Factor<'_>) -> Result<Symbol, AdaptError> {
        let name = factor.role.in_layer(self.name);
        let symbol = module.param(&name, &factor.shape, factor.init, ParamRole::Weight)?;
        module.declare(&symbol, |param| {
            param.trainable = !self.config.is_frozen;
            let (weight, dim, of) = factor.shares;
            param.beside = Some(Beside {
                param: weight.to_owned(),
                dim,
                of,
            });
        });
        Ok(symbol)
    }
}
