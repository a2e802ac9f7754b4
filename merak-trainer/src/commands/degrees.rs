//! The degrees of a run, as options of commands.

use clap::Args as ClapArgs;
use merak_ckpt::cli::at_least_one;

/// The degrees of three axes, each 1 where it is not given.
#[derive(Debug, Clone, Copy, ClapArgs)]
pub(crate) struct DegreeOptions {
    /// Data-parallel replicas.
    #[arg(long, default_value_t = 1, value_parser = at_least_one)]
    pub(crate) dp: usize,
    /// Tensor-parallel ranks.
    #[arg(long, default_value_t = 1, value_parser = at_least_one)]
    pub(crate) tp: usize,
    /// Pipeline stages.
    #[arg(long, default_value_t = 1, value_parser = at_least_one)]
    pub(crate) pp: usize,
}

impl DegreeOptions {
    /// The degrees as option, key and value.
    pub(crate) fn options(self) -> [(&'static str, &'static str, String); 3] {
        [
            ("--dp", "dp", self.dp),
            ("--tp", "tp", self.tp),
            ("--pp", "pp", self.pp),
        ]
        .map(|(option, key, degree)| (option, key, degree.to_string()))
    }
}
