//! Writes libtorch's folder into the run path of the command and the tests, in builds with feature
//! `tch`.

use std::{env, path::PathBuf};

fn main() {
    // Set by torch-sys, a dependency with that feature only.
    println!("cargo::rerun-if-env-changed=DEP_TCH_LIBTORCH_LIB");
    if let Some(lib) = env::var_os("DEP_TCH_LIBTORCH_LIB") {
        let lib = PathBuf::from(lib);
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
    }
}
