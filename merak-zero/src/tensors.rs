//! An optimizer over the tensors of another library.

use crate::{
    Error, FlatLayout, GlobalParams, ParamSpec, Result, UpdateReport, ZeroConfig, ZeroGroups,
    ZeroOptimizer, ZeroStage, flat,
};
use merak_mpu::{Buffer, DType, Group, HostTensor};
use std::{collections::BTreeMap, ops::Range};

/// A [`ZeroOptimizer`] over named tensors of a tensor library, which are changed where they lie.
///
/// The parameters lie in the flat buffers in the order of their names, so all ranks agree on it
/// without a word. A step reads the tensors, so what was loaded into them meanwhile counts. Stage 3
/// is refused, as each rank holds whole tensors.
#[derive(Debug)]
pub struct TensorOptimizer<T> {
    /// In the order of the layout.
    tensors: Vec<T>,
    optimizer: ZeroOptimizer,
    params: Vec<f32>,
    grads: Vec<f32>,
}

impl<T: HostTensor> TensorOptimizer<T> {
    /// Builds the optimizer of this rank over its trainable parameters, with zeroed state.
    ///
    /// `adapt` changes what the optimizer knows of a parameter: which ones do not decay
    /// ([`ParamSpec::without_decay`]), and which copy of one that several ranks of a replica hold
    /// whole counts in the norm ([`ParamSpec::with_norm`]).
    ///
    /// # Communication
    /// An all-gather of the names and sizes over the model group.
    ///
    /// # Errors
    /// [`Error::Tensor`] where a tensor is not in host memory or not f32; [`Error::OutOfRange`] for
    /// stage 3, and for [`ZeroConfig::has_masters`] in stages 1 and 2; as [`ZeroOptimizer::new`].
    pub fn new(
        params: BTreeMap<String, T>,
        config: ZeroConfig,
        groups: ZeroGroups,
        adapt: impl Fn(ParamSpec) -> ParamSpec,
    ) -> Result<Self> {
        for (name, tensor) in &params {
            check_type(name, &*tensor.lend().map_err(at(name))?)?;
        }
        let numels = params.iter().map(|(name, tensor)| {
            let numel: usize = tensor.sizes().iter().product();
            (name.clone(), numel)
        });
        let all = whole_model(&groups.model, numels.collect())?;
        let places: BTreeMap<&String, usize> = all.keys().zip(0..).collect();
        let specs = params
            .iter()
            .map(|(name, tensor)| adapt(ParamSpec::new(name, &tensor.sizes(), places[name])));
        let specs = specs.collect();
        if config.stage > ZeroStage::Gradients {
            return Err(Error::out_of_range(
                "stage",
                u8::from(config.stage),
                "at most 2 for whole tensors",
            ));
        }
        if config.has_masters && config.stage > ZeroStage::Replicated {
            let expected = "false for whole tensors in stages 1 and 2";
            return Err(Error::out_of_range("has_masters", true, expected));
        }
        let optimizer = ZeroOptimizer::new(specs, GlobalParams::new(all), config, groups)?;
        let len = optimizer.layout().len();
        let mut made = Self {
            tensors: params.into_values().collect(),
            params: vec![0.0; len],
            grads: vec![0.0; optimizer.num_gradients()],
            optimizer,
        };
        if made.optimizer.keeps_average() {
            made.take_params()?;
            made.optimizer.preview_average(&made.params)?;
        }
        Ok(made)
    }

    /// Reduces, clips and applies gradients with learning rate `lr`, as [`ZeroOptimizer::step`]
    /// does.
    ///
    /// `grad` gives the gradient of each parameter: its name and tensor are passed. A parameter
    /// without one has zeros, as another rank may have used it.
    ///
    /// # Communication
    /// As [`ZeroOptimizer::step`].
    ///
    /// # Errors
    /// [`Error::Tensor`] and [`Error::GradientLength`] where a gradient does not fit its parameter,
    /// and as [`ZeroOptimizer::step`].
    pub fn step_with<G: HostTensor>(
        &mut self,
        lr: f64,
        grad: impl FnMut(&str, &T) -> Option<G>,
    ) -> Result<UpdateReport> {
        self.take_params()?;
        self.take_gradients(grad)?;
        let report = self.optimizer.step(&mut self.params, &mut self.grads, lr)?;
        if report.skipped.is_some() {
            return Ok(report);
        }
        let layout = self.optimizer.layout();
        for (index, tensor) in self.tensors.iter().enumerate() {
            let (name, range) = (&layout.params()[index].name, layout.range(index));
            let mut own = tensor.lend().map_err(at(name))?;
            flat::write(&mut *own, |to| to.copy_from_slice(&self.params[range]));
        }
        Ok(report)
    }

    /// Copies the tensors into the flat buffer.
    fn take_params(&mut self) -> Result<()> {
        let layout = self.optimizer.layout();
        for (index, tensor) in self.tensors.iter().enumerate() {
            let (name, range) = (&layout.params()[index].name, layout.range(index));
            let own = tensor.lend().map_err(at(name))?;
            copy(name, &*own, &mut self.params[range])?;
        }
        Ok(())
    }

    /// Copies the gradients into their buffer, or gives them to the optimizer bucket by bucket
    /// where they are divided.
    fn take_gradients<G: HostTensor>(
        &mut self,
        mut grad: impl FnMut(&str, &T) -> Option<G>,
    ) -> Result<()> {
        let mut copy_of = |layout: &FlatLayout, flat: Range<usize>, out: &mut [f32]| {
            out.fill(0.0);
            for (index, tensor) in self.tensors.iter().enumerate() {
                let (name, range) = (&layout.params()[index].name, layout.range(index));
                if range.is_empty() || !flat.contains(&range.start) {
                    continue;
                }
                if let Some(grad) = grad(name, tensor) {
                    let grad = grad.share().map_err(at(name))?;
                    let place = range.start - flat.start..range.end - flat.start;
                    copy(name, &*grad, &mut out[place])?;
                }
            }
            Ok(())
        };
        if !self.optimizer.divides_gradients() {
            let layout = self.optimizer.layout();
            return copy_of(layout, 0..layout.len(), &mut self.grads);
        }
        self.grads.fill(0.0);
        for bucket in (0..self.optimizer.layout().buckets().len()).rev() {
            let layout = self.optimizer.layout();
            let flat = layout.buckets()[bucket].flat.clone();
            let mut own = vec![0.0; flat.len()];
            copy_of(layout, flat, &mut own)?;
            let kept = &mut self.grads;
            self.optimizer.add_bucket(bucket, Box::new(own), kept)?;
        }
        Ok(())
    }

    #[cfg(feature = "tch")]
    pub(crate) fn tensors_mut(&mut self) -> &mut [T] {
        &mut self.tensors
    }

    /// The optimizer over the flat buffers: its layout, settings, state and progress.
    pub fn optimizer(&self) -> &ZeroOptimizer {
        &self.optimizer
    }

    /// The same, to continue from a checkpoint.
    pub fn optimizer_mut(&mut self) -> &mut ZeroOptimizer {
        &mut self.optimizer
    }
}

/// The parameters of all ranks of a replica with their local sizes.
fn whole_model(group: &Group, own: BTreeMap<String, usize>) -> Result<BTreeMap<String, usize>> {
    if group.is_single() {
        return Ok(own);
    }
    let rows = own.iter().map(|(name, numel)| format!("{numel} {name}\0"));
    let rows = rows.collect::<String>().into_bytes();
    let ranks = group
        .all_gather_bytes(rows)
        .map_err(Error::communication("the exchange of parameter names"))?;
    let mut all = BTreeMap::new();
    for rows in &ranks {
        let rows = String::from_utf8_lossy(rows);
        for (numel, name) in rows.split('\0').filter_map(|row| row.split_once(' ')) {
            // A rank that has another size finds it in the table and fails.
            let numel = numel.parse().unwrap_or(0);
            all.entry(name.to_owned()).or_insert(numel);
        }
    }
    Ok(all)
}

fn check_type(param: &str, buffer: &dyn Buffer) -> Result<()> {
    if buffer.dtype() == DType::F32 {
        return Ok(());
    }
    Err(at(param)(merak_mpu::Error::DTypeMismatch {
        expected: DType::F32,
        found: buffer.dtype(),
    }))
}

/// Copies the elements of a tensor into their place in a flat buffer.
fn copy(param: &str, from: &dyn Buffer, to: &mut [f32]) -> Result<()> {
    check_type(param, from)?;
    if from.len() != to.len() {
        return Err(Error::GradientLength {
            param: param.to_owned(),
            expected: to.len(),
            found: from.len(),
        });
    }
    flat::read(from, |from| to.copy_from_slice(from));
    Ok(())
}

fn at(param: &str) -> impl FnOnce(merak_mpu::Error) -> Error + '_ {
    move |source| Error::Tensor {
        param: param.to_owned(),
        source,
    }
}
