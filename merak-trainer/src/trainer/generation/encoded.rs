//! Passes of encoder-decoders: whole sequences, with what the encoder reads beside them.

use super::{
    decoding::{Generation, Pass, rows},
    search::Search,
};
use crate::{
    error::Result,
    plan::Forward,
    stage::{StepInputs, StepModule},
    trainer::{MerakTrainer, callback::Told},
};
use merak_pipe::PipelineEngine;

/// Lengths are rounded up to a multiple of this, so that one program serves several tokens.
const LENGTHS: usize = 16;

impl Generation<'_> {
    /// Passes whole sequences through encoder and decoder; the last stage returns what follows
    /// them. All sequences of a group have the same number of the decoder's tokens.
    ///
    /// Rows are filled up behind their tokens. The decoder is causal and the encoder's mask hides
    /// what is filled up, so neither changes what follows.
    pub(super) fn pass_encoded(
        &mut self,
        engine: &PipelineEngine,
        pass: &Pass,
        search: &Search,
    ) -> Result<Vec<u32>> {
        let sources: Vec<_> = pass
            .sequences
            .iter()
            .map(|&(sequence, _)| self.source(sequence))
            .collect();
        let batch = sources.len();
        let longest = sources.iter().map(|source| source.len()).max();
        let seq = rounded(longest.unwrap_or(0));
        let decoded = pass.ids.len() / batch;
        let target = rounded(decoded);
        let ids = sources
            .iter()
            .map(|source| source.iter().map(|&id| i64::from(id)));
        let seen = sources.iter().map(|source| vec![1_i64; source.len()]);
        let inputs = [
            ("input_ids", filled(ids, seq)),
            ("attention_mask", filled(seen, seq)),
            (
                "decoder_input_ids",
                filled(pass.ids.chunks(decoded).map(<[i64]>::to_vec), target),
            ),
        ];
        let MerakTrainer {
            stages,
            programs,
            link,
            parts,
            ..
        } = &mut *self.trainer;
        let programs = programs.get(stages, Forward::logits(batch, seq, Some(target)))?;
        let inputs = StepInputs {
            contexts: vec![stages.context(0, 0, false)],
            batches: vec![rows(batch, inputs)],
            loss_grad: 0.0,
        };
        let mut module = StepModule::inference(stages, &programs, inputs);
        let mut told = Told(&mut parts.callbacks);
        let spans = engine.run_observed(&mut module, link, &mut told)?;
        self.spans.extend(spans);
        let outputs = module.finish().outputs.into_values().next();
        match outputs {
            Some(mut outputs) => {
                self.choose(outputs.swap_remove(0), pass, decoded - 1..target, search)
            }
            None => Ok(Vec::new()),
        }
    }

    /// What the encoder reads for a sequence.
    pub(super) fn source(&self, sequence: u64) -> &[u32] {
        let (first, sources) = self.sources.expect("an encoder-decoder has sources");
        &sources[(sequence / self.sequences_per_prompt - first) as usize]
    }
}

fn rounded(length: usize) -> usize {
    length.next_multiple_of(LENGTHS)
}

/// Rows of this length, with zeros behind what each has.
fn filled(rows: impl Iterator<Item = impl IntoIterator<Item = i64>>, length: usize) -> Vec<i64> {
    rows.flat_map(|row| row.into_iter().chain(std::iter::repeat(0)).take(length))
        .collect()
}
