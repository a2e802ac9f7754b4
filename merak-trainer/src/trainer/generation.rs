//! Text generation: prompts pass the pipeline once, and every token after them in a short pass.

use super::MerakTrainer;
use crate::{
    Error, Forward, Result,
    data::{Batch, Microbatch, SampleTensor},
    stage::{Decoded, RankStages, StepInputs, StepModule},
};
use merak_ckpt::{Completion, Decoding, GenerateOptions, NewToken, Row, Sampler};
use merak_mpu::{DType, Packet, into_vec};
use merak_pipe::Engine;
use merak_trace::{Interpreter, KvCache, Value};
use std::{
    collections::{BTreeMap, VecDeque},
    ops::ControlFlow,
    sync::Arc,
};

/// Programs that are kept; those of prompts have many sizes.
const MAX_PROGRAMS: usize = 32;

/// Most positions of several sequences that pass together: enough for fast products.
const MAX_POSITIONS: usize = 512;

/// The tag of messages with tokens, which no two stages use.
const TOKENS: u64 = u64::MAX;

/// Forward programs by what they are made for.
#[derive(Debug, Default)]
pub(super) struct Programs {
    built: BTreeMap<Forward, Arc<[Interpreter]>>,
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
        if self.built.len() >= MAX_PROGRAMS {
            self.built.clear();
        }
        self.built.insert(forward, Arc::clone(&interpreters));
        Ok(interpreters)
    }
}

/// One call of [`MerakTrainer::generate`] on this rank.
///
/// Each group of prompts is in one place of the pipeline: every rank starts the groups one after the other, and a
/// group again as soon as it has its tokens. So with as many groups as stages, each stage has one to work on.
///
/// ```text
/// stage 0   g0 g1 g2 g0 g1 g2 ..        the tokens of g0 come back while g1 and g2 pass
/// stage 1      g0 g1 g2 g0 g1 ..
/// stage 2         g0 g1 g2 g0 ..
/// ```
struct Generation<'a> {
    trainer: &'a mut MerakTrainer,
    sampler: Sampler,
    engine: Engine,
    /// What the attentions of each stage of the rank have seen.
    caches: Vec<KvCache>,
    /// The stage with the model's last attention.
    last_attention: usize,
}

/// A group that was started.
struct Started {
    prompts: Vec<u64>,
    /// Its next tokens, on the rank that chose them.
    tokens: Option<Vec<u32>>,
}

impl Generation<'_> {
    /// Decodes until every sequence has ended.
    fn run(
        &mut self,
        mut decoding: Decoding,
        on_token: &mut dyn FnMut(NewToken) -> ControlFlow<()>,
    ) -> Result<Vec<Completion>> {
        let prompts: Vec<u64> = decoding.rows().iter().map(|row| row.prompt).collect();
        let stages = self.trainer.stages.mpu.pipeline_parallel_world_size();
        let size = prompts.len().div_ceil(stages).max(1);
        let mut under_way = VecDeque::new();
        for group in prompts.chunks(size) {
            under_way.push_back(self.start(&decoding, group.to_vec())?);
        }
        while let Some(group) = under_way.pop_front() {
            let (mut prompts, tokens) = self.finish(group)?;
            for (&prompt, id) in prompts.iter().zip(tokens) {
                if on_token(decoding.push(prompt, id)).is_break() {
                    decoding.stop(prompt);
                }
            }
            prompts.retain(|&prompt| {
                let waits = decoding.row(prompt).is_some();
                if !waits {
                    self.forget(prompt);
                }
                waits
            });
            if !prompts.is_empty() {
                under_way.push_back(self.start(&decoding, prompts)?);
            }
        }
        Ok(decoding.finish())
    }

    /// Runs this rank's stages for the next positions of some sequences, all of which wait.
    fn start(&mut self, decoding: &Decoding, prompts: Vec<u64>) -> Result<Started> {
        let rows: Vec<_> = prompts.iter().filter_map(|&p| decoding.row(p)).collect();
        for row in &rows {
            self.forget_unless_it_fits(row);
        }
        let mut tokens = Vec::with_capacity(rows.len());
        let mut rest = &rows[..];
        while !rest.is_empty() {
            let (pass, others) = rest.split_at(self.fitting(rest));
            tokens.extend(self.pass(pass)?);
            rest = others;
        }
        let stages = &self.trainer.stages;
        if !stages.has_last() {
            return Ok(Started {
                prompts,
                tokens: None,
            });
        }
        let group = stages.mpu.pipeline_parallel_group();
        for peer in (0..group.world_size()).filter(|&peer| peer != group.rank()) {
            let packet = Packet {
                shape: vec![tokens.len()],
                data: Box::new(tokens.clone()),
            };
            group.send(peer, TOKENS, vec![packet])?;
        }
        Ok(Started {
            prompts,
            tokens: Some(tokens),
        })
    }

    /// The tokens of a group, from the last stage.
    fn finish(&self, group: Started) -> Result<(Vec<u64>, Vec<u32>)> {
        let Started { prompts, tokens } = group;
        if let Some(tokens) = tokens {
            return Ok((prompts, tokens));
        }
        let stages = &self.trainer.stages;
        let pipeline = stages.mpu.pipeline_parallel_group();
        let message = pipeline.recv(stages.plan.last_rank(), TOKENS)?;
        let packet = message.into_iter().next();
        let data = packet.expect("tokens come in one packet").data;
        Ok((prompts, into_vec(data)?))
    }

    /// The length by which positions of a sequence are scaled.
    fn context(&self, positions: usize) -> usize {
        self.trainer.stages.plan.model.scaling_length(positions)
    }

    /// Forgets the keys of a sequence when they belong to other positions than its next ones, or are not to be used.
    fn forget_unless_it_fits(&mut self, row: &Row<'_>) {
        let fits = self.context(self.passed(row)) == self.context(row.tokens.len());
        if !fits || !self.trainer.args.use_cache {
            self.forget(row.prompt);
        }
    }

    fn forget(&mut self, prompt: u64) {
        let caches = self.caches.iter_mut();
        caches.for_each(|cache| cache.remove(prompt));
    }

    /// How many rows pass together: those whose next positions fit into one sequence of the model and are scaled
    /// alike.
    fn fitting(&self, rows: &[Row<'_>]) -> usize {
        let limit = self.trainer.stages.plan.info.max_seq.min(MAX_POSITIONS);
        let context = |row: &Row<'_>| self.context(row.tokens.len());
        let mut positions = 0;
        let fits = |row: &&Row<'_>| {
            positions += row.tokens.len() - self.passed(row);
            positions <= limit && context(row) == context(&rows[0])
        };
        rows.iter().take_while(fits).count().max(1)
    }

    /// Positions of a sequence that the caches have.
    fn passed(&self, row: &Row<'_>) -> usize {
        let cache = self.caches.first();
        cache.map_or(0, |cache| cache.positions(row.prompt))
    }

    /// Passes the next positions of some sequences through the rank's stages; gives their tokens on the last one.
    fn pass(&mut self, rows: &[Row<'_>]) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        let (mut sequences, mut newest) = (Vec::new(), Vec::new());
        for row in rows {
            let next = &row.tokens[self.passed(row)..];
            ids.extend(next.iter().map(|&token| i64::from(token)));
            sequences.push((row.prompt, next.len()));
            newest.push(ids.len() - 1);
        }
        let forward = Forward {
            batch: 1,
            seq: ids.len(),
            context: self.context(rows[0].tokens.len()),
            logits: true,
        };
        let only_newest = Forward {
            seq: newest.len(),
            ..forward
        };
        let MerakTrainer {
            stages,
            programs,
            link,
            ..
        } = &mut *self.trainer;
        let decoded = Decoded {
            programs: programs.get(stages, forward)?,
            tails: (newest.len() < ids.len())
                .then(|| programs.get(stages, only_newest))
                .transpose()?,
            last_attention: self.last_attention,
            caches: &mut self.caches,
            sequences,
            newest,
        };
        let inputs = StepInputs {
            contexts: vec![stages.context(0, 0, false)],
            batches: vec![batch(ids)],
            loss_grad: 0.0,
        };
        let mut module = StepModule::decoding(stages, decoded, inputs);
        self.engine.run(&mut module, link)?;
        let outputs = module.finish().outputs.into_values().next();
        match outputs {
            Some(mut outputs) => self.pick(outputs.swap_remove(0), rows),
            None => Ok(Vec::new()),
        }
    }

    /// Chooses a token for each row of logits.
    fn pick(&self, logits: Value, rows: &[Row<'_>]) -> Result<Vec<u32>> {
        let backend = &self.trainer.stages.backend;
        let ty = logits.ty().clone();
        let buffer = backend.into_buffer(logits)?;
        let mut tokens = Ok(Vec::new());
        buffer.read(&mut |bytes| {
            let rows = rows
                .iter()
                .zip(bytes.chunks_exact(bytes.len() / rows.len()));
            let pick = |(row, bytes): (&Row<'_>, &[u8])| {
                let pick = |logits: &[f32]| self.sampler.pick(logits, row.prompt, row.tokens);
                if ty.dtype == DType::BF16 {
                    let narrow = bytemuck::cast_slice::<_, half::bf16>(bytes).iter();
                    pick(&narrow.map(|logit| logit.to_f32()).collect::<Vec<_>>())
                } else {
                    pick(bytemuck::cast_slice(bytes))
                }
            };
            tokens = rows.map(pick).collect();
        });
        // The backend uses the memory again.
        drop(backend.from_buffer(&ty, buffer)?);
        Ok(tokens?)
    }
}

/// One sequence of these tokens.
fn batch(ids: Vec<i64>) -> Batch {
    let tensor = SampleTensor::new(vec![1, ids.len()], ids).expect("the length is theirs");
    Batch {
        microbatch: Microbatch {
            first_position: 0,
            indices: Vec::new(),
            rows: 1,
            epoch: 0,
        },
        tensors: BTreeMap::from([("input_ids".to_owned(), tensor)]),
    }
}

impl MerakTrainer {
    /// Continues prompts; every rank calls it and gets the same.
    ///
    /// A prompt passes the model once, then one token at a time: each stage keeps the keys and values of its own
    /// layers and heads. Prompts of any lengths pass together, end to end and without padding, in as many groups as
    /// there are stages, which follow each other through the pipeline. Without `use_cache` the whole sequence passes
    /// again for each token; with it where positions are scaled by the length and the next token changes that (once
    /// under `longrope`, from the longest sequence of training on under `dynamic`), as keys of other positions would
    /// not fit.
    ///
    /// # Communication
    /// Per token the pipeline's forward hops for each group of prompts, and the tokens from the last stage to each
    /// other one.
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
        let (sampler, decoding) = (Sampler::new(&options)?, Decoding::new(prompts, &options)?);
        let mut generation = Generation {
            sampler,
            engine: self.stages.forward_engine(1)?,
            caches: self
                .stages
                .stages
                .iter()
                .map(|_| KvCache::default())
                .collect(),
            last_attention: self.stages.plan.last_attention(),
            trainer: self,
        };
        generation.run(decoding, on_token)
    }
}
