//! The conditions under which measured times hold.

use crate::{
    config::CheckedArguments,
    machine::num_cores,
    world::{ranks_at_once, threads_per_rank},
};
use merak_trace::backend::candle::Products;
use sysinfo::{CpuRefreshKind, System};

/// Everything besides the nodes that changes their times, in words.
pub(super) fn conditions(args: &CheckedArguments) -> String {
    let threads = threads_per_rank(args);
    let compute = &args.compute;
    let build = if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    };
    // Another build has other kernels.
    let program = std::env::current_exe().and_then(std::fs::metadata).ok();
    let program = program.and_then(|file| {
        let written = file.modified().ok()?.duration_since(std::time::UNIX_EPOCH);
        Some(format!(
            "{} bytes of {}",
            file.len(),
            written.ok()?.as_secs()
        ))
    });
    let processor = System::new().ok().and_then(|mut system| {
        system.refresh_cpu_specifics(CpuRefreshKind::nothing());
        Some(system.cpus().first()?.brand().to_owned())
    });
    let processor = processor.unwrap_or_default();
    format!(
        "merak {} {build} {}, {} on {}, {} x {processor}, {} of {} ranks at once on {threads} threads each{}, dp {}, tp {}{}, {}{}",
        env!("CARGO_PKG_VERSION"),
        program.unwrap_or_default(),
        compute.backend,
        compute.device,
        num_cores(),
        ranks_at_once(args).min(args.world_size()),
        args.world_size(),
        args.connection().map_or_else(String::new, |connection| {
            format!(", by {connection}, {} on its cores", args.core_sharers())
        }),
        args.dp,
        args.tp,
        if args.sp > 1 {
            format!(", sp {} by {}", args.sp, args.sp_method)
        } else {
            String::new()
        },
        args.optim,
        // The types of values show neither weights that are kept in narrower elements nor rounded
        // factors of products.
        match (args.narrow(), args.autocast()) {
            (Some(narrow), _) => format!(", {narrow}"),
            (None, Some(narrow)) => format!(", autocast to {narrow}"),
            (None, None) if args.products() == Products::Rounded => ", rounded products".to_owned(),
            (None, None) => String::new(),
        },
    )
}
