//! The decode loop of one replica: groups of prompts go round the pipeline.

use super::search::Search;
use crate::{
    data::{Batch, Microbatch, SampleTensor},
    error::Result,
    plan::Forward,
    stage::{Decoded, StepInputs, StepModule, floats},
    trainer::{MerakTrainer, callback::Told},
};
use merak_ckpt::{Completion, NewToken, Row};
use merak_mpu::{Packet, into_vec};
use merak_pipe::{Action, Kind, MicrobatchId, PipelineEngine, Rounds, Span, StageId, Visit};
use merak_trace::{KvCache, NextPositions, Value};
use std::{ops::ControlFlow, time::Instant};

/// Upper bound on the positions of several sequences that pass together: enough for fast products.
const MAX_POSITIONS: usize = 512;

/// The tag of messages with tokens of the first group; other groups have the tags below it.
/// Messages between stages use neither.
const TOKENS: u64 = u64::MAX;

/// One call of [`MerakTrainer::generate`] on this rank.
///
/// Each group of prompts is in one place of the pipeline, and starts again as soon as it has its
/// tokens ([`Rounds`]). So with as many groups as ranks, each rank has one to work on.
///
/// ```text
/// stage 0   g0 g1 g2 g0 g1 g2 ..        the tokens of g0 come back while g1 and g2 pass
/// stage 1      g0 g1 g2 g0 g1 ..
/// stage 2         g0 g1 g2 g0 ..
/// ```
pub(super) struct Generation<'a> {
    trainer: &'a mut MerakTrainer,
    /// What the encoder reads, by prompt, from this number on; for encoder-decoders.
    sources: Option<(u64, &'a [Vec<u32>])>,
    /// Sequences that each prompt may have at once.
    sequences_per_prompt: u64,
    epoch: Instant,
    spans: Vec<Span>,
    /// The keys and values of each stage of the rank.
    caches: Vec<KvCache>,
    /// The stage with the model's last attention.
    last_attention: usize,
}

/// Prompts that pass together.
#[derive(Debug, Default)]
struct Group {
    number: u64,
    /// The prompts that have not ended.
    prompts: Vec<u64>,
    /// The passes of this round; empty before the first.
    passes: Vec<Pass>,
    /// What follows its sequences ([`Search::choose`]), on the rank that chose it.
    words: Option<Vec<u32>>,
}

/// The next positions of some sequences, end to end.
#[derive(Debug)]
struct Pass {
    pieces: Vec<NextPositions>,
    ids: Vec<i64>,
    /// What an encoder reads.
    sources: Vec<i64>,
    /// The last position of each sequence.
    newest: Vec<usize>,
    /// The length by which positions are scaled.
    context: usize,
}

impl<'a> Generation<'a> {
    /// For encoder-decoders, `sources` are the prompts from the first of that number on.
    pub(super) fn new(
        trainer: &'a mut MerakTrainer,
        sources: Option<(u64, &'a [Vec<u32>])>,
        num_beams: usize,
    ) -> Self {
        let stages = trainer.stages.stages.iter();
        Self {
            sources,
            sequences_per_prompt: num_beams as u64,
            epoch: trainer.stages.mpu.member().epoch(),
            spans: Vec::new(),
            caches: stages.map(|_| KvCache::default()).collect(),
            last_attention: trainer.stages.plan.last_attention(),
            trainer,
        }
    }

    /// Decodes until every sequence has ended.
    pub(super) fn run(
        mut self,
        mut search: Search,
        on_token: &mut dyn FnMut(NewToken) -> ControlFlow<()>,
    ) -> Result<Vec<Completion>> {
        let prompts = search.waiting();
        let pipeline = self.trainer.stages.mpu.pipeline_parallel_group();
        let (rank, ranks) = (pipeline.rank(), pipeline.world_size());
        let size = prompts.len().div_ceil(ranks).max(1);
        let groups = (0..).zip(prompts.chunks(size));
        let mut groups: Vec<_> = groups
            .map(|(number, prompts)| Group {
                number,
                prompts: prompts.to_vec(),
                ..Group::default()
            })
            .collect();
        let plan = &self.trainer.stages.plan;
        let first_stage = plan.stages_of(rank).next();
        let visits = Rounds::new(plan.placement(), groups.len());
        for visit in visits.filter(|visit| visit.rank == rank) {
            if groups.iter().all(|group| group.prompts.is_empty()) {
                break;
            }
            let group = &mut groups[visit.group];
            if group.prompts.is_empty() {
                continue;
            }
            if Some(visit.stages.start) == first_stage {
                if !group.passes.is_empty() {
                    self.take_words(group, &mut search, on_token)?;
                }
                group.passes = self.passes(&search, &group.prompts);
            }
            self.visit(&visit, group, &search)?;
        }
        self.trainer.records.timeline = self.spans;
        Ok(search.finish())
    }

    /// Ends a group's round: its sequences grow by their tokens, and prompts that are done leave
    /// it.
    fn take_words(
        &mut self,
        group: &mut Group,
        search: &mut Search,
        on_token: &mut dyn FnMut(NewToken) -> ControlFlow<()>,
    ) -> Result<()> {
        let mut words = self.words_of(group)?.into_iter();
        group.prompts.retain(|&prompt| {
            let before: Vec<_> = search.rows(prompt).iter().map(|row| row.prompt).collect();
            let going = search.advance(prompt, &mut words, on_token);
            for cache in &mut self.caches {
                if going.iter().any(|(before, after)| before != after) {
                    cache.follow(&going);
                }
                for &sequence in &before {
                    if !going.iter().any(|(_, after)| *after == sequence) {
                        cache.remove(sequence);
                    }
                }
            }
            !going.is_empty()
        });
        Ok(())
    }

    /// What follows the sequences of a group, from the last stage.
    fn words_of(&self, group: &mut Group) -> Result<Vec<u32>> {
        if let Some(words) = group.words.take() {
            return Ok(words);
        }
        let stages = &self.trainer.stages;
        let pipeline = stages.mpu.pipeline_parallel_group();
        let message = pipeline.recv(stages.plan.last_rank(), TOKENS - group.number)?;
        let packet = message.into_iter().next();
        let data = packet.expect("words come in one packet").data;
        Ok(into_vec(data)?)
    }

    /// Runs stages of this rank for a group; after the last stage, tells all ranks of the pipeline
    /// what follows its sequences.
    fn visit(&mut self, visit: &Visit, group: &mut Group, search: &Search) -> Result<()> {
        let action = |stage| Action::new(StageId(stage), Kind::Forward, MicrobatchId(0));
        let actions: Vec<_> = visit.stages.clone().map(action).collect();
        let placement = self.trainer.stages.plan.placement();
        let is_last = visit.stages.end == placement.len();
        let engine =
            PipelineEngine::of_actions(&actions, placement, visit.rank).with_epoch(self.epoch);
        let mut words = Vec::with_capacity(group.prompts.len());
        for pass in &group.passes {
            words.extend(self.pass(&engine, pass, search)?);
        }
        if !is_last || group.passes.is_empty() {
            return Ok(());
        }
        let pipeline = self.trainer.stages.mpu.pipeline_parallel_group();
        for peer in (0..pipeline.world_size()).filter(|&peer| peer != pipeline.rank()) {
            let packet = Packet {
                shape: vec![words.len()],
                data: Box::new(words.clone()),
            };
            pipeline.send(peer, TOKENS - group.number, vec![packet])?;
        }
        group.words = Some(words);
        Ok(())
    }

    /// The next positions of sequences that wait, grouped into passes.
    fn passes(&mut self, search: &Search, prompts: &[u64]) -> Vec<Pass> {
        let rows: Vec<_> = prompts.iter().flat_map(|&p| search.rows(p)).collect();
        for row in &rows {
            self.forget_unless_it_fits(row);
        }
        let mut passes = Vec::new();
        let mut rest = &rows[..];
        while !rest.is_empty() {
            let (together, others) = rest.split_at(self.fitting(rest));
            let mut pass = Pass {
                pieces: Vec::new(),
                ids: Vec::new(),
                sources: Vec::new(),
                newest: Vec::new(),
                context: self.context(together[0].tokens.len()),
            };
            for row in together {
                let (next, source) = (&row.tokens[self.passed(row)..], self.source(row));
                pass.ids.extend(next.iter().map(|&token| i64::from(token)));
                pass.sources
                    .extend(source.iter().map(|&token| i64::from(token)));
                pass.pieces.push(NextPositions {
                    sequence: row.prompt,
                    positions: next.len(),
                    source: source.len(),
                });
                pass.newest.push(pass.ids.len() - 1);
            }
            passes.push(pass);
            rest = others;
        }
        passes
    }

    /// The length by which positions of a sequence are scaled.
    fn context(&self, positions: usize) -> usize {
        self.trainer
            .stages
            .plan
            .draft
            .model
            .scaling_length(positions)
    }

    /// Forgets the keys of a sequence when its next positions are scaled in another way, or without
    /// `use_cache`.
    fn forget_unless_it_fits(&mut self, row: &Row<'_>) {
        let fits = self.context(self.passed(row)) == self.context(row.tokens.len());
        if !fits || !self.trainer.args.use_cache {
            self.forget(row.prompt);
        }
    }

    fn forget(&mut self, sequence: u64) {
        let caches = self.caches.iter_mut();
        caches.for_each(|cache| cache.remove(sequence));
    }

    /// How many rows pass together: those whose next positions fit into one sequence of the model
    /// and are scaled alike.
    fn fitting(&self, rows: &[Row<'_>]) -> usize {
        let longest = self.trainer.stages.plan.draft.info.max_seq;
        let limit = match self.sources {
            Some(_) => MAX_POSITIONS,
            None => longest.min(MAX_POSITIONS),
        };
        let context = |row: &Row<'_>| self.context(row.tokens.len());
        let mut positions = 0;
        let fits = |row: &&Row<'_>| {
            positions += row.tokens.len() - self.passed(row);
            positions += self.source(row).len();
            positions <= limit && context(row) == context(&rows[0])
        };
        rows.iter().take_while(fits).count().max(1)
    }

    /// Positions of a sequence that the caches have.
    fn passed(&self, row: &Row<'_>) -> usize {
        let cache = self.caches.first();
        cache.map_or(0, |cache| cache.positions(row.prompt))
    }

    /// What an encoder has yet to read for a sequence.
    fn source(&self, row: &Row<'_>) -> &'a [u32] {
        match self.sources {
            Some((first, sources)) if self.passed(row) == 0 => {
                &sources[(row.prompt / self.sequences_per_prompt - first) as usize]
            }
            _ => &[],
        }
    }

    /// Passes positions through stages of this rank; the last stage returns what follows them.
    fn pass(&mut self, engine: &PipelineEngine, pass: &Pass, search: &Search) -> Result<Vec<u32>> {
        let source = self.sources.map(|_| pass.sources.len());
        let forward = |positions| Forward {
            context: pass.context,
            ..Forward::next(positions, source)
        };
        let (forward, only_newest) = (forward(pass.ids.len()), forward(pass.newest.len()));
        let MerakTrainer {
            stages,
            programs,
            link,
            parts,
            ..
        } = &mut *self.trainer;
        let decoded = Decoded {
            programs: programs.get(stages, forward)?,
            tails: (only_newest != forward)
                .then(|| programs.get(stages, only_newest))
                .transpose()?,
            last_attention: self.last_attention,
            caches: &mut self.caches,
            pieces: &pass.pieces,
            newest: &pass.newest,
        };
        let inputs = StepInputs {
            contexts: vec![stages.context(0, 0, false)],
            batches: vec![batch(pass, source.is_some())],
            loss_grad: 0.0,
        };
        let mut module = StepModule::decoding(stages, decoded, inputs);
        let mut told = Told(&mut parts.callbacks);
        let spans = engine.run_observed(&mut module, link, &mut told)?;
        self.spans.extend(spans);
        let outputs = module.finish().outputs.into_values().next();
        match outputs {
            Some(mut outputs) => self.choose(outputs.swap_remove(0), pass, search),
            None => Ok(Vec::new()),
        }
    }

    /// What follows the sequences of a pass.
    fn choose(&mut self, logits: Value, pass: &Pass, search: &Search) -> Result<Vec<u32>> {
        let rows = pass.pieces.iter();
        let rows: Vec<_> = rows
            .filter_map(|piece| search.row(piece.sequence))
            .collect();
        let backend = &self.trainer.stages.backend;
        let ty = logits.ty().clone();
        let buffer = backend.into_buffer(logits)?;
        let mut words = Ok(Vec::new());
        buffer.read(&mut |bytes| {
            let of_rows = bytes.chunks_exact(bytes.len() / rows.len());
            let choose =
                |(row, bytes): (&Row<'_>, &[u8])| search.choose(row, &floats(ty.dtype, bytes));
            let chosen = rows.iter().zip(of_rows).map(choose);
            words = chosen.collect::<Result<Vec<_>>>();
        });
        // The backend reuses the memory.
        drop(backend.from_buffer(&ty, buffer)?);
        // Choosing is a part of the last stage's work.
        if let Some(last) = self.spans.last_mut() {
            last.end = self.epoch.elapsed().as_secs_f64();
        }
        Ok(words?.concat())
    }
}

/// The tokens of a pass as one sequence, after that of the encoder if there is one.
fn batch(pass: &Pass, has_encoder: bool) -> Batch {
    let tensor = |name: &str, ids: &[i64]| {
        let tensor = SampleTensor::new(vec![1, ids.len()], ids.to_vec());
        (name.to_owned(), tensor.expect("the length is theirs"))
    };
    let tensors = if has_encoder {
        vec![
            tensor("input_ids", &pass.sources),
            tensor("decoder_input_ids", &pass.ids),
        ]
    } else {
        vec![tensor("input_ids", &pass.ids)]
    };
    Batch {
        microbatch: Microbatch {
            first_position: 0,
            indices: Vec::new(),
            rows: 1,
            epoch: 0,
        },
        tensors: tensors.into_iter().collect(),
    }
}
