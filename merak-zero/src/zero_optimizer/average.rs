//! The averages of the weights that an optimizer steps.

use super::{Room, ZeroOptimizer};
use crate::{
    Result, ZeroConfig,
    average::{self, Place},
    flat,
    state::OwnedState,
};
use merak_mpu::Buffer;

/// The state with averages beside it, where they are kept.
pub(super) fn beside(state: OwnedState, config: &ZeroConfig) -> OwnedState {
    if config.ema_decay.is_some() {
        state.with_average()
    } else {
        state
    }
}

impl ZeroOptimizer {
    /// Whether averages of the weights are kept ([`ZeroConfig::ema_decay`]).
    pub fn keeps_average(&self) -> bool {
        self.config.ema_decay.is_some()
    }

    /// Makes the averages those of these parameters alone, as at the start of a run. The first
    /// step, also if it is skipped, does so by itself where neither this nor
    /// [`ZeroOptimizer::edit_state`] was called.
    ///
    /// # Errors
    /// When `params` does not fit the layout, or a file for the averages cannot be had.
    pub fn start_average(&mut self, params: &dyn Buffer) -> Result<()> {
        flat::check("parameter", params, self.num_params())?;
        let places = self.places_of_averages();
        flat::read(params, |params| {
            self.edit_averages(|averages| average::start(params, averages, &places))
        })?;
        self.average_begun = true;
        Ok(())
    }

    /// Exchanges the parameters and their averages, on all ranks of the data x sequence group
    /// together. A second call gives both back, bit for bit; no step comes between the two.
    ///
    /// # Communication
    /// As the gathering of parameters in [`ZeroOptimizer::step`].
    ///
    /// # Errors
    /// When `params` does not fit the layout, a file for the averages cannot be had, or the group
    /// fails.
    pub fn swap_average(&mut self, params: &mut dyn Buffer) -> Result<()> {
        flat::check("parameter", params, self.num_params())?;
        self.begin_average(params)?;
        let places = self.places_of_averages();
        flat::write(params, |params| {
            self.edit_averages(|averages| average::swap(params, averages, &places))
        })?;
        let mut arrivals = self.exchange.arrivals(&self.layout, self.keeps_average());
        arrivals.finish(params)
    }

    /// Starts the averages before the first step.
    pub(super) fn begin_average(&mut self, params: &dyn Buffer) -> Result<()> {
        if self.keeps_average() && !self.average_begun {
            return self.start_average(params);
        }
        Ok(())
    }

    /// Makes the averages those of these parameters until the first step, which starts them anew.
    pub(crate) fn preview_average(&mut self, params: &dyn Buffer) -> Result<()> {
        self.begin_average(params)?;
        self.average_begun = false;
        Ok(())
    }

    /// Moves the averages towards parameters that were stepped.
    pub(super) fn follow(&mut self, params: &dyn Buffer) -> Result<()> {
        let Some(decay) = self.config.ema_decay else {
            return Ok(());
        };
        if let Room::Device(device) = &mut self.room {
            return device.average(decay, params);
        }
        let (places, threads) = (self.places_of_averages(), self.config.threads);
        flat::read(params, |params| {
            self.edit_averages(|averages| {
                average::follow(decay, params, averages, &places, threads);
            })
        })
    }

    fn places_of_averages(&self) -> Vec<Place> {
        self.state.places_of_averages(self.exchange.params())
    }

    /// Changes the averages of what this rank owns, if they are kept.
    fn edit_averages(&mut self, edit: impl FnOnce(&mut [f32])) -> Result<()> {
        self.keep_in_files()?;
        match &mut self.room {
            Room::Memory | Room::Files(_) => {
                if let Some(averages) = self.state.averages_mut() {
                    edit(averages);
                }
            }
            Room::Device(device) => device.edit_averages(edit),
        }
        Ok(())
    }
}
