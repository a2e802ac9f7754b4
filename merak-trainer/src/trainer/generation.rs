//! Text generation: every token is one forward over the pipeline.

use super::MerakTrainer;
use crate::{
    Error, Result,
    data::{Batch, Microbatch, SampleTensor},
    stage::{Stage, StepInputs, StepModule},
};
use merak_ckpt::{BoxError, Completion, GenerateOptions, Row, Sampler, TokenSource};
use merak_mpu::{Buffer, DType, into_vec};
use merak_pipe::{Engine, ScheduleKind, Size};
use merak_trace::Interpreter;
use std::{collections::BTreeMap, sync::Arc};

/// Sequences are padded to a multiple of this, so that few programs serve all lengths.
const LENGTH_STEP: usize = 32;

/// Forward programs by batch, length and whether they end in logits.
#[derive(Debug, Default)]
pub(super) struct Programs(BTreeMap<(usize, usize, bool), Interpreter>);

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
        if let Some(found) = self.0.get(&key) {
            return Ok(found.clone());
        }
        let program =
            stage
                .plan
                .inference_program(stage.mpu.pipeline_parallel_rank(), batch, seq, logits)?;
        let backend = Arc::clone(stage.interpreter.backend());
        let interpreter = Interpreter::new(Arc::new(program), backend, Arc::clone(&stage.mpu) as _);
        self.0.insert(key, interpreter.clone());
        Ok(interpreter)
    }
}

impl MerakTrainer {
    /// Continues prompts; every rank calls it and gets the same.
    ///
    /// The whole sequence passes the model again for each token.
    ///
    /// # Communication
    /// Per token the pipeline's forward hops and a broadcast of the tokens from the last stage.
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
        Ok(merak_ckpt::generate_with(
            self,
            prompts,
            &options,
            &mut |_| std::ops::ControlFlow::Continue(()),
        )?)
    }

    /// Logits `[rows, seq, V]` of padded sequences on the last stage; `None` elsewhere.
    fn logits(&mut self, rows: &[Row<'_>], seq: usize) -> Result<Option<Vec<f32>>> {
        let interpreter = self.programs.get(&self.stage, rows.len(), seq, true)?;
        let mut ids = Vec::with_capacity(rows.len() * seq);
        for row in rows {
            ids.extend(row.tokens.iter().map(|&token| i64::from(token)));
            // A causal model does not look at what follows, so any padding does.
            let padding = i64::from(self.args.pad_token_id.unwrap_or(0));
            ids.resize(ids.len() + seq - row.tokens.len(), padding);
        }
        let tensor = SampleTensor::new(vec![rows.len(), seq], ids)
            .expect("every row was padded to the length");
        let microbatch = Microbatch {
            first_position: 0,
            indices: Vec::new(),
            rows: rows.len(),
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
        let mut module = StepModule::inference(
            &mut self.stage,
            &interpreter,
            StepInputs {
                contexts,
                batches,
                loss_grad: 0.0,
            },
        );
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
        let longest = rows.iter().map(|row| row.tokens.len()).max().unwrap_or(1);
        let seq = longest
            .next_multiple_of(LENGTH_STEP)
            .min(self.stage.plan.info.max_seq);
        let vocab = self.stage.plan.info.vocab_size;
        let mut tokens = vec![0_u32; rows.len()];
        if let Some(logits) = self.logits(rows, seq)? {
            for ((row, sequence), token) in rows
                .iter()
                .zip(logits.chunks_exact(seq * vocab))
                .zip(&mut tokens)
            {
                let last = row.tokens.len() - 1;
                *token =
                    sampler.pick(&sequence[last * vocab..][..vocab], row.prompt, row.tokens)?;
            }
        }
        let mpu = &self.stage.mpu;
        Ok(mpu
            .pipeline_parallel_group()
            .broadcast_vec(tokens, mpu.pipeline_parallel_world_size() - 1)?)
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
