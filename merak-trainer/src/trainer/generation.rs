//! Text generation: a prompt is one forward over the pipeline, and every token after it a short one.

use super::MerakTrainer;
use crate::{
    Error, Result,
    data::{Batch, Microbatch, SampleTensor},
    stage::{Stage, StepInputs, StepModule},
};
use merak_ckpt::{BoxError, Completion, GenerateOptions, Row, Sampler, TokenSource};
use merak_mpu::{Buffer, DType, into_vec};
use merak_pipe::{Engine, ScheduleKind, Size};
use merak_trace::{Interpreter, KvCache};
use std::{collections::BTreeMap, sync::Arc};

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

    /// Puts new prompts into groups by their lengths, and lets go of groups that are done.
    fn regroup(&mut self, rows: &[Row<'_>]) {
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
        self.groups.extend(new.into_values());
    }
}

impl MerakTrainer {
    /// Continues prompts; every rank calls it and gets the same.
    ///
    /// A prompt passes the model once, then one token at a time: each stage keeps the keys and values of its own
    /// layers and heads. Prompts of one length pass together, and those of them that are done come along until
    /// all are. Without `use_cache` the whole sequence passes again for each token.
    ///
    /// # Communication
    /// Per token the pipeline's forward hops for each length of prompts, and a broadcast of the tokens from the last
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
        let mut go_on = |_| std::ops::ControlFlow::Continue(());
        let completions = merak_ckpt::generate_with(self, prompts, &options, &mut go_on);
        self.programs.groups.clear();
        Ok(completions?)
    }

    /// Logits `[rows, seq, V]` of the next `seq` positions of a group on the last stage; `None` elsewhere. `ids`
    /// are their tokens.
    fn logits(&mut self, group: &mut Group, seq: usize, ids: Vec<i64>) -> Result<Option<Vec<f32>>> {
        let count = group.prompts.len();
        let interpreter = self.programs.get(&self.stage, count, seq, true)?;
        let tensor = SampleTensor::new(vec![count, seq], ids).expect("every row has the length");
        let microbatch = Microbatch {
            first_position: 0,
            indices: Vec::new(),
            rows: count,
            epoch: 0,
        };
        let batches = vec![Batch {
            microbatch,
            tensors: BTreeMap::from([("input_ids".to_owned(), tensor)]),
        }];
        let contexts = vec![self.stage.context(0, 0, false)];
        let mpu = Arc::clone(&self.stage.mpu);
        let size = Size {
            ranks: mpu.pipeline_parallel_world_size(),
            microbatches: 1,
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
        let cache = (&mut group.cache, seq);
        let mut module = StepModule::decoding(&mut self.stage, &interpreter, inputs, cache);
        engine.run(&mut module, &mut self.link)?;
        let Some(outputs) = module.finish().outputs.remove(&0) else {
            return Ok(None);
        };
        let logits = self.stage.interpreter.backend().into_buffer(
            outputs
                .into_iter()
                .next()
                .expect("the program ends in logits"),
        )?;
        Ok(Some(widened(logits)?))
    }

    fn next_tokens_of(&mut self, rows: &[Row<'_>], sampler: &Sampler) -> Result<Vec<u32>> {
        self.programs.regroup(rows);
        let mut tokens = vec![0_u32; rows.len()];
        let mut groups = std::mem::take(&mut self.programs.groups);
        for group in &mut groups {
            self.advance(group, rows, sampler, &mut tokens)?;
        }
        self.programs.groups = groups;
        let mpu = &self.stage.mpu;
        Ok(mpu
            .pipeline_parallel_group()
            .broadcast_vec(tokens, mpu.pipeline_parallel_world_size() - 1)?)
    }

    /// Passes the next positions of a group; the last stage enters the tokens of its rows.
    fn advance(
        &mut self,
        group: &mut Group,
        rows: &[Row<'_>],
        sampler: &Sampler,
        tokens: &mut [u32],
    ) -> Result<()> {
        if !self.args.use_cache {
            group.cache = KvCache::default();
        }
        let row_of = |prompt: &u64| rows.iter().position(|row| row.prompt == *prompt);
        let waiting: Vec<_> = group.prompts.iter().map(row_of).collect();
        let past = group.cache.positions();
        let Some(length) = waiting
            .iter()
            .flatten()
            .map(|&row| rows[row].tokens.len())
            .max()
        else {
            return Ok(());
        };
        let seq = length - past;
        let padding = i64::from(self.args.pad_token_id.unwrap_or(0));
        let mut ids = Vec::with_capacity(waiting.len() * seq);
        for row in &waiting {
            match row {
                Some(row) => ids.extend(rows[*row].tokens[past..].iter().map(|&t| i64::from(t))),
                None => ids.extend(std::iter::repeat_n(padding, seq)),
            }
        }
        let Some(logits) = self.logits(group, seq, ids)? else {
            return Ok(());
        };
        let vocab = self.stage.plan.info.vocab_size;
        for (row, sequence) in waiting.iter().zip(logits.chunks_exact(seq * vocab)) {
            if let Some(row) = *row {
                let last = &sequence[(seq - 1) * vocab..];
                tokens[row] = sampler.pick(last, rows[row].prompt, rows[row].tokens)?;
            }
        }
        Ok(())
    }
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
