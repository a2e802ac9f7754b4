//! Links libtorch into this crate's own tests: the shim over its headers, and the run path.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "tch")]
    link();
}

#[cfg(feature = "tch")]
fn link() {
    let lib = "DEP_TCH_LIBTORCH_LIB";
    println!("cargo::rerun-if-env-changed={lib}");
    let lib = std::env::var_os(lib).expect("torch-sys tells where libtorch is");
    let lib = std::path::PathBuf::from(lib);
    let sources = ["pool", "shim"].map(|name| format!("src/backend/tch/{name}.cpp"));
    for source in &sources {
        println!("cargo::rerun-if-changed={source}");
    }
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .warnings(false)
        .include(lib.with_file_name("include"))
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        .files(&sources);
    // `at::parallel_for` lies in a header: where that is compiled without OpenMP, it runs on one
    // thread. libtorch is built with GCC's.
    if build.get_compiler().is_like_gnu() {
        build.flag("-fopenmp");
        println!("cargo::rustc-link-lib=gomp");
    }
    build.compile("merak_tch_shim");
}
