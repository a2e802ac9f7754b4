//! Text generation: a prompt is one forward over the pipeline, and every token after it a short one.

use super::MerakTrainer;
use crate::{
    Error, Forward, Result,
    data::{Batch, Microbatch, SampleTensor},
    stage::{Decoded, RankStages, StepInputs, StepModule},
};
use merak_ckpt::{BoxError, Completion, GenerateOptions, NewToken, Row, Sampler, TokenSource};
use merak_mpu::{Buffer, DType, into_vec};
use merak_trace::{Interpreter, KvCache};
use std::{collections::BTreeMap, ops::ControlFlow, sync::Arc};

/// What generation keeps: forward programs by what they are made for, and the prompts that are under way.
#[derive(Debug, Default)]
pub(super) struct Programs {
    built: BTreeMap<Forward, Arc<[Interpreter]>>,
    groups: Vec<Group>,
}

/// Prompts of one length, which pass the model together.
#[derive(Debug, Default)]
struct Group {
    prompts: Vec<u64>,
    /// What each stage of this rank keeps of them.
    caches: Vec<KvCache>,
}

impl Programs {
    /// The programs of the rank's stages, built at their first use.
    pub(super) fn get(
        &mut self,
        stages: &RankStages,
        forward: Forward,
    ) -> Result<Arc<[Interpreter]>> {
        if let Some(found) = self.built.get(&forward) {
            return Ok(Arc::clone(found));
        }
        let numbers = stages.stages.iter().map(|stage| stage.number);
        let programs = stages.plan.inference_programs(numbers, forward)?;
        let interpreter = |program| {
            let backend = Arc::clone(&stages.backend);
            Interpreter::new(Arc::new(program), backend, Arc::clone(&stages.mpu) as _)
        };
        let interpreters: Arc<[_]> = programs.into_iter().map(interpreter).collect();
        self.built.insert(forward, Arc::clone(&interpreters));
        Ok(interpreters)
    }

    /// Puts new prompts into groups by their lengths, those of one length into as many as there are stages to keep
    /// busy, and lets go of groups that are done.
    fn regroup(&mut self, rows: &[Row<'_>], stages: usize) {
        let is_waiting = |prompt: &u64| rows.iter().any(|row| row.prompt == *prompt);
        self.groups
            .retain(|group| group.prompts.iter().any(is_waiting));
        let mut new: BTreeMap<usize, Group> = BTreeMap::new();
        for row in rows {
            if !self
                .groups
                .iter()
                .any(|group| group.prompts.contains(&row.prompt))
            {
                let group = new.entry(row.tokens.len()).or_default();
                group.prompts.push(row.prompt);
            }
        }
        for group in new.into_values() {
            let size = group.prompts.len().div_ceil(stages);
            let parts = group.prompts.chunks(size).map(|prompts| Group {
                prompts: prompts.to_vec(),
                caches: Vec::new(),
            });
            self.groups.extend(parts);
        }
    }
}

impl MerakTrainer {
    /// Continues prompts; every rank calls it and gets the same.
    ///
    /// A prompt passes the model once, then one token at a time: each stage keeps the keys and values of its own
    /// layers and heads. Prompts of one length pass together, in as many groups as there are stages, which follow
    /// each other through the pipeline; those of them that are done come along until all of their group are.
    /// Without `use_cache` the whole sequence passes again for each token; with it where positions are scaled by the
    /// length and the next token changes that (once under `longrope`, from the longest sequence of training on
    /// under `dynamic`), as keys of other positions would not fit.
    ///
    /// # Communication
    /// Per token the pipeline's forward hops for each group of prompts, and a broadcast of the tokens from the last
    /// stage.
    ///
    /// # Errors
    /// When an option is out of range, a prompt is empty, leaves no room or has an unknown token, or a rank
    /// fails.
    pub fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
    ) -> Result<Vec<Completion>> {
        let mut go_on = |_| ControlFlow::Continue(());
        self.generate_with(prompts, options, &mut go_on)
    }

    /// The same; `on_token` sees each token as it is chosen, and ends its sequence where it breaks. On every rank it
    /// must decide alike.
    ///
    /// # Errors
    /// As [`MerakTrainer::generate`].
    pub fn generate_with(
        &mut self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
        on_token: &mut dyn FnMut(NewToken) -> ControlFlow<()>,
    ) -> Result<Vec<Completion>> {
        self.stages.plan.expect_causal("text generation")?;
        let (max_seq, vocab) = (
            self.stages.plan.info.max_seq,
            self.stages.plan.info.vocab_size,
        );
        for (prompt, tokens) in prompts.iter().enumerate() {
            if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocab) {
                return Err(Error::PromptToken {
                    prompt,
                    token,
                    vocab,
                });
            }
        }
        let seq_length = Some(
            options
                .seq_length
                .map_or(max_seq, |limit| limit.min(max_seq)),
        );
        let options = GenerateOptions {
            seq_length,
            ..options.clone()
        };
        self.programs.groups.clear();
        let completions = merak_ckpt::generate_with(self, prompts, &options, on_token);
        self.programs.groups.clear();
        Ok(completions?)
    }

    /// Logits of the next positions of groups on the last stage, `[rows, seq, V]` each; nothing elsewhere. The
    /// groups follow each other through the pipeline.
    fn logits(&mut self, groups: &mut [Group], next: Vec<Next>) -> Result<Vec<Vec<f32>>> {
        let mut decoded = Vec::with_capacity(groups.len());
        let mut batches = Vec::with_capacity(groups.len());
        let contexts = vec![self.stages.context(0, 0, false); groups.len()];
        for (group, next) in groups.iter_mut().zip(next) {
            let Next {
                seq, context, ids, ..
            } = next;
            let rows = group.prompts.len();
            let forward = Forward {
                batch: rows,
                seq,
                context,
                logits: true,
            };
            let programs = self.programs.get(&self.stages, forward)?;
            group.caches.resize_with(programs.len(), KvCache::default);
            decoded.push(Decoded {
                programs,
                caches: &mut group.caches,
                positions: seq,
            });
            let tensor = SampleTensor::new(vec![rows, seq], ids).expect("every row has the length");
            batches.push(Batch {
                microbatch: Microbatch {
                    first_position: 0,
                    indices: Vec::new(),
                    rows,
                    epoch: 0,
                },
                tensors: BTreeMap::from([("input_ids".to_owned(), tensor)]),
            });
        }
        let engine = self.stages.forward_engine(decoded.len())?;
        let inputs = StepInputs {
            contexts,
            batches,
            loss_grad: 0.0,
        };
        let mut module = StepModule::decoding(&mut self.stages, decoded, inputs);
        engine.run(&mut module, &mut self.link)?;
        let outputs = module.finish().outputs.into_values();
        let backend = &self.stages.backend;
        let logits = outputs.map(|mut outputs| {
            let logits = outputs.swap_remove(0);
            Ok(widened(backend.into_buffer(logits)?)?)
        });
        logits.collect()
    }

    fn next_tokens_of(&mut self, rows: &[Row<'_>], sampler: &Sampler) -> Result<Vec<u32>> {
        let stages = self.stages.mpu.pipeline_parallel_world_size();
        self.programs.regroup(rows, stages);
        let mut groups = std::mem::take(&mut self.programs.groups);
        let next: Vec<_> = groups
            .iter_mut()
            .map(|group| self.next_of(group, rows))
            .collect();
        let places: Vec<_> = next
            .iter()
            .map(|next| (next.seq, next.rows.clone()))
            .collect();
        let logits = self.logits(&mut groups, next)?;
        self.programs.groups = groups;
        let vocab = self.stages.plan.info.vocab_size;
        let mut tokens = vec![0_u32; rows.len()];
        for ((seq, places), logits) in places.iter().zip(logits) {
            for (row, sequence) in places.iter().zip(logits.chunks_exact(seq * vocab)) {
                if let Some(row) = *row {
                    let last = &sequence[(seq - 1) * vocab..];
                    tokens[row] = sampler.pick(last, rows[row].prompt, rows[row].tokens)?;
                }
            }
        }
        let mpu = &self.stages.mpu;
        Ok(mpu
            .pipeline_parallel_group()
            .broadcast_vec(tokens, self.stages.plan.last_rank())?)
    }

    /// The next positions of a group.
    fn next_of(&self, group: &mut Group, rows: &[Row<'_>]) -> Next {
        let row_of = |prompt: &u64| rows.iter().position(|row| row.prompt == *prompt);
        let waiting: Vec<_> = group.prompts.iter().map(row_of).collect();
        let lengths = waiting.iter().flatten().map(|&row| rows[row].tokens.len());
        let length = lengths
            .max()
            .expect("a group that is kept waits for a token");
        let model = &self.stages.plan.model;
        let context = model.scaling_length(length);
        let positions = |group: &Group| group.caches.first().map_or(0, KvCache::positions);
        if !self.args.use_cache || model.scaling_length(positions(group)) != context {
            group.caches.clear();
        }
        let past = positions(group);
        let seq = length - past;
        let padding = i64::from(self.args.pad_token_id.unwrap_or(0));
        let mut ids = Vec::with_capacity(waiting.len() * seq);
        for row in &waiting {
            match row {
                Some(row) => ids.extend(rows[*row].tokens[past..].iter().map(|&t| i64::from(t))),
                None => ids.extend(std::iter::repeat_n(padding, seq)),
            }
        }
        Next {
            seq,
            context,
            ids,
            rows: waiting,
        }
    }
}

/// The positions of a group that pass next.
#[derive(Debug)]
struct Next {
    /// How many of each sequence.
    seq: usize,
    /// The length by which their positions are scaled.
    context: usize,
    /// Their tokens, sequence by sequence.
    ids: Vec<i64>,
    /// Which row of the decode loop each sequence is; `None` for one that is done.
    rows: Vec<Option<usize>>,
}

impl TokenSource for MerakTrainer {
    fn next_tokens(&mut self, rows: &[Row<'_>], sampler: &Sampler) -> Result<Vec<u32>, BoxError> {
        Ok(self.next_tokens_of(rows, sampler)?)
    }
}

/// Numbers of a float type that models compute in, as `f32`.
fn widened(buffer: Box<dyn Buffer>) -> Result<Vec<f32>, merak_mpu::Error> {
    if buffer.dtype() == DType::BF16 {
        let narrow = into_vec::<half::bf16>(buffer)?;
        return Ok(narrow.into_iter().map(half::bf16::to_f32).collect());
    }
    into_vec(buffer)
}
