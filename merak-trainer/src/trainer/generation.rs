//! Text generation: a prompt is one forward over the pipeline, and every token after it a short one.

use super::MerakTrainer;
use crate::{
    Error, Result,
    data::{Batch, Microbatch, SampleTensor},
    stage::{Decoded, Stage, StepInputs, StepModule},
};
use merak_ckpt::{BoxError, Completion, GenerateOptions, NewToken, Row, Sampler, TokenSource};
use merak_mpu::{Buffer, DType, into_vec};
use merak_pipe::{Engine, ScheduleKind, Size};
use merak_trace::{Interpreter, KvCache};
use std::{collections::BTreeMap, ops::ControlFlow, sync::Arc};

/// What generation keeps: forward programs by batch, length and whether they end in logits, and the prompts
/// that are under way.
#[derive(Debug, Default)]
pub(super) struct Programs {
    built: BTreeMap<(usize, usize, bool), Interpreter>,
    groups: Vec<Group>,
}

/// Prompts of one length, which pass the model together.
#[derive(Debug, Default)]
struct Group {
    prompts: Vec<u64>,
    /// What this stage keeps of them.
    cache: KvCache,
}

impl Programs {
    /// The program for these sizes, built at its first use.
    pub(super) fn get(
        &mut self,
        stage: &Stage,
        batch: usize,
        seq: usize,
        logits: bool,
    ) -> Result<Interpreter> {
        let key = (batch, seq, logits);
        if let Some(found) = self.built.get(&key) {
            return Ok(found.clone());
        }
        let program =
            stage
                .plan
                .inference_program(stage.mpu.pipeline_parallel_rank(), batch, seq, logits)?;
        let backend = Arc::clone(stage.interpreter.backend());
        let interpreter = Interpreter::new(Arc::new(program), backend, Arc::clone(&stage.mpu) as _);
        self.built.insert(key, interpreter.clone());
        Ok(interpreter)
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
                cache: KvCache::default(),
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
    /// Without `use_cache` the whole sequence passes again for each token.
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
        self.stage.plan.expect_causal("text generation")?;
        let (max_seq, vocab) = (
            self.stage.plan.info.max_seq,
            self.stage.plan.info.vocab_size,
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
        let contexts = vec![self.stage.context(0, 0, false); groups.len()];
        for (group, Next { seq, ids, .. }) in groups.iter_mut().zip(next) {
            let rows = group.prompts.len();
            decoded.push(Decoded {
                program: self.programs.get(&self.stage, rows, seq, true)?,
                cache: &mut group.cache,
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
        let mpu = Arc::clone(&self.stage.mpu);
        let size = Size {
            ranks: mpu.pipeline_parallel_world_size(),
            microbatches: decoded.len(),
            chunks: 1,
        };
        let engine = Engine::new(
            &ScheduleKind::Inference.generate(size)?,
            mpu.pipeline_parallel_rank(),
        )?;
        let inputs = StepInputs {
            contexts,
            batches,
            loss_grad: 0.0,
        };
        let mut module = StepModule::decoding(&mut self.stage, decoded, inputs);
        engine.run(&mut module, &mut self.link)?;
        let outputs = module.finish().outputs.into_values();
        let backend = self.stage.interpreter.backend();
        let logits = outputs.map(|mut outputs| {
            let logits = outputs.swap_remove(0);
            Ok(widened(backend.into_buffer(logits)?)?)
        });
        logits.collect()
    }

    fn next_tokens_of(&mut self, rows: &[Row<'_>], sampler: &Sampler) -> Result<Vec<u32>> {
        let stages = self.stage.mpu.pipeline_parallel_world_size();
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
        let vocab = self.stage.plan.info.vocab_size;
        let mut tokens = vec![0_u32; rows.len()];
        for ((seq, places), logits) in places.iter().zip(logits) {
            for (row, sequence) in places.iter().zip(logits.chunks_exact(seq * vocab)) {
                if let Some(row) = *row {
                    let last = &sequence[(seq - 1) * vocab..];
                    tokens[row] = sampler.pick(last, rows[row].prompt, rows[row].tokens)?;
                }
            }
        }
        let mpu = &self.stage.mpu;
        Ok(mpu
            .pipeline_parallel_group()
            .broadcast_vec(tokens, stages - 1)?)
    }

    /// The next positions of a group.
    fn next_of(&self, group: &mut Group, rows: &[Row<'_>]) -> Next {
        if !self.args.use_cache {
            group.cache = KvCache::default();
        }
        let row_of = |prompt: &u64| rows.iter().position(|row| row.prompt == *prompt);
        let waiting: Vec<_> = group.prompts.iter().map(row_of).collect();
        let past = group.cache.positions();
        let lengths = waiting.iter().flatten().map(|&row| rows[row].tokens.len());
        let length = lengths
            .max()
            .expect("a group that is kept waits for a token");
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
