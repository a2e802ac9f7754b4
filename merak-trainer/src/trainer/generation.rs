//! Text generation: prompts pass the pipeline once, and every token after them in a short pass.

mod decoding;
mod programs;
mod search;
mod stop_strings;

pub(super) use self::programs::Programs;
pub use self::stop_strings::StopStrings;
use self::{decoding::Generation, search::Search};
use super::{MerakTrainer, link};
use crate::error::{Error, Result};
use merak_ckpt::{Completion, GenerateOptions, NewToken};
use std::ops::{ControlFlow, Range};

impl MerakTrainer {
    /// Continues prompts. Every rank gives the same prompts and gets the same completions. Replicas
    /// share the prompts; each of the ranks that share a sequence in training is one.
    ///
    /// A prompt passes the model once, then one token at a time: each stage keeps the keys and
    /// values of its own layers and heads. Prompts of any lengths pass together, end to end and
    /// without padding, in as many groups as the pipeline has ranks, which follow each other
    /// through it. Without `use_cache` the whole sequence passes again for each token. With it, the
    /// sequence passes again where the next token changes how its length scales positions, as the
    /// kept keys would not fit: once under `longrope`, and from the longest training sequence on
    /// under `dynamic`.
    ///
    /// With several beams the likeliest continuation of a beam search is returned, and `on_token`
    /// of [`MerakTrainer::generate_with`] sees nothing. Of an encoder-decoder, prompts are what the
    /// encoder reads, once for all tokens, and the decoder's sequences begin with
    /// `decoder_start_token_id`.
    ///
    /// # Communication
    /// Per token the pipeline's forward hops for each group of prompts, and the tokens from the
    /// last stage to each other one; at the end the completions over data × sequence. In ZeRO stage
    /// 3 first an all-gather of the parameters, which stay in memory meanwhile.
    ///
    /// # Errors
    /// When an option is out of range, a prompt is empty, leaves no room or has an unknown token,
    /// or a rank fails.
    pub fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
    ) -> Result<Vec<Completion>> {
        let mut go_on = |_| ControlFlow::Continue(());
        self.generate_with(prompts, options, &mut go_on)
    }

    /// Checks the prompts as [`MerakTrainer::generate`] does, on any rank alone.
    ///
    /// # Errors
    /// When an option is out of range, or a prompt is empty, leaves no room or has an unknown
    /// token.
    pub fn check_prompts(&self, prompts: &[Vec<u32>], options: &GenerateOptions) -> Result<()> {
        let plan = &self.stages.plan;
        plan.expect_generative("text generation")?;
        let vocab = plan.draft.info.vocab_size;
        for (prompt, tokens) in prompts.iter().enumerate() {
            if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocab) {
                return Err(Error::PromptToken {
                    prompt,
                    token,
                    vocab,
                });
            }
        }
        self.search(prompts, &self.limited(options)).map(drop)
    }

    /// The options with their length limited to the model's.
    fn limited(&self, options: &GenerateOptions) -> GenerateOptions {
        let longest = self.stages.plan.draft.info.max_seq;
        let limit = options.seq_length.unwrap_or(longest);
        GenerateOptions {
            // Relative positions of a decoder beside an encoder have no end.
            seq_length: (!self.stages.plan.has_encoder()).then_some(limit.min(longest)),
            ..options.clone()
        }
    }

    /// The sequences that grow, before the first token: the prompts, or those of a decoder beside
    /// an encoder.
    fn search(&self, prompts: &[Vec<u32>], options: &GenerateOptions) -> Result<Search> {
        if !self.stages.plan.has_encoder() {
            return Search::new(prompts, options);
        }
        let numbered = (options.first_prompt..).zip(prompts);
        if let Some((prompt, _)) = numbered.into_iter().find(|(_, ids)| ids.is_empty()) {
            return Err(merak_ckpt::Error::EmptyPrompt { prompt }.into());
        }
        let start = options.decoder_start_token_id.ok_or_else(|| {
            let (key, found) = ("decoder_start_token_id", "none".to_owned());
            merak_ckpt::Error::InvalidOption {
                key,
                found,
                expected: "the token from which the decoder starts",
            }
        })?;
        Search::new(&vec![vec![start]; prompts.len()], options)
    }

    /// As [`MerakTrainer::generate`], with a callback: `on_token` sees each token of this rank's
    /// replica as it is chosen, and ends the sequence by `Break`. It must decide alike on every
    /// rank of a replica. The first replica continues the first prompt.
    ///
    /// # Errors
    /// As [`MerakTrainer::generate`].
    ///
    /// # Panics
    /// Never: completions are plain data.
    pub fn generate_with(
        &mut self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
        on_token: &mut dyn FnMut(NewToken) -> ControlFlow<()>,
    ) -> Result<Vec<Completion>> {
        self.check_prompts(prompts, options)?;
        let options = self.limited(options);
        // Sequences pass whole, so ranks that share those of a training are replicas here.
        let replicas = self.stages.mpu.data_sequence_parallel_group().clone();
        let own = share(prompts.len(), replicas.rank(), replicas.world_size());
        let options = GenerateOptions {
            first_prompt: options.first_prompt + own.start as u64,
            ..options
        };
        let prompts = &prompts[own];
        let search = self.search(prompts, &options)?;
        let has_encoder = self.stages.plan.has_encoder();
        let sources = has_encoder.then_some((options.first_prompt, prompts));
        let held = self.stages.hold_params()?;
        // Replicas make different numbers of passes, so no turn is that of several.
        let turns = self.stages.mpu.tensor_parallel_group();
        let of_replica = link(&self.stages.mpu, &self.args, turns);
        let shared = std::mem::replace(&mut self.link, of_replica);
        let completions = Generation::new(self, sources, options.num_beams).run(search, on_token);
        self.link = shared;
        drop(held);
        let mut completions = completions?;
        if has_encoder {
            for (completion, prompt) in completions.iter_mut().zip(prompts) {
                completion.prompt_ids.clone_from(prompt);
            }
        }
        if replicas.world_size() == 1 {
            return Ok(completions);
        }
        let encoded = serde_json::to_vec(&completions).expect("numbers and a word");
        let decode = |bytes: &Vec<u8>| {
            serde_json::from_slice::<Vec<Completion>>(bytes).expect("a rank's own completions")
        };
        let all = replicas.all_gather_bytes(encoded)?;
        Ok(all.iter().flat_map(decode).collect())
    }
}

/// The prompts that a replica continues: as many as the others, or one more where it is among the
/// first.
fn share(prompts: usize, replica: usize, replicas: usize) -> Range<usize> {
    let first = |replica: usize| (replica * prompts).div_ceil(replicas);
    first(replica)..first(replica + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_prompt_has_one_replica_and_the_first_is_never_without() {
        for (prompts, replicas) in [(0, 2), (1, 2), (5, 4), (8, 3), (3, 1)] {
            let shares: Vec<_> = (0..replicas).map(|r| share(prompts, r, replicas)).collect();
            let all: Vec<_> = shares.iter().cloned().flatten().collect();
            assert_eq!(all, (0..prompts).collect::<Vec<_>>());
            let fewest = prompts / replicas;
            assert!(shares.iter().all(|share| share.len().abs_diff(fewest) <= 1));
            assert_eq!(shares[0].len(), prompts.div_ceil(replicas));
        }
    }
}
