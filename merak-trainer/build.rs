//! Flags of the linker: libtorch's folder in the run path of the command and the tests, in builds
//! with feature `tch`, and equal functions once in a release.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

fn main() {
    // Set by torch-sys, a dependency with that feature only.
    println!("cargo::rerun-if-env-changed=DEP_TCH_LIBTORCH_LIB");
    if let Some(lib) = env::var_os("DEP_TCH_LIBTORCH_LIB") {
        let lib = PathBuf::from(lib);
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
    }
    if of_cargo("PROFILE") == "release" && links_with_own_lld() {
        println!("cargo::rustc-link-arg-bins=-Wl,--icf=all");
    }
}

/// A variable that cargo sets for build scripts; empty where it does not.
fn of_cargo(name: &str) -> String {
    let value = env::var_os(name).unwrap_or_default();
    value.to_string_lossy().into_owned()
}

/// Whether rustc links with the lld that it brings along, which folds equal functions: the default
/// of this target, where neither cargo nor a flag names another linker.
fn links_with_own_lld() -> bool {
    const TARGET: &str = "x86_64-unknown-linux-gnu";
    let flags = of_cargo("CARGO_ENCODED_RUSTFLAGS");
    let names_another = ["linker", "fuse-ld"]
        .iter()
        .any(|flag| flags.contains(flag));
    let is_default = of_cargo("RUSTC_LINKER").is_empty() && !names_another;
    if of_cargo("TARGET") != TARGET || of_cargo("HOST") != TARGET || !is_default {
        return false;
    }
    let sysroot = Command::new(of_cargo("RUSTC"))
        .args(["--print", "sysroot"])
        .output();
    sysroot.is_ok_and(|sysroot| {
        let sysroot = String::from_utf8_lossy(&sysroot.stdout);
        let lld = format!("lib/rustlib/{TARGET}/bin/gcc-ld/ld.lld");
        Path::new(sysroot.trim()).join(lld).exists()
    })
}
