//! Writes the checkpoint of a made-up GPT with the state of AdamW, as tensor-parallel ranks would,
//! for measuring what `merak-ckpt` does with large ones; `docs/peers/reshard_peer.py` uses it.
//!
//! ```sh
//! cargo run --release -p merak-ckpt --example made_up -- FOLDER --layers 12 --hidden 768 --tp 4
//! target/release/merak-ckpt reshard FOLDER OTHER --tp 2 --pp 2
//! ```

use clap::Parser;
use merak_ckpt::{
    Cut, DType, Draft, Header, Kind, Layout, Piece, Result, Shard, ShardKind, Store, Topology,
};

/// Writes the checkpoint of a made-up GPT-2.
#[derive(Debug, Parser)]
struct Arguments {
    /// Output folder
    folder: String,
    /// Transformer layers
    #[arg(long, default_value_t = 12)]
    layers: usize,
    /// Width of the hidden states
    #[arg(long, default_value_t = 768)]
    hidden: usize,
    /// Vocabulary
    #[arg(long, default_value_t = 50304)]
    vocab: usize,
    /// Tensor-parallel ranks that write
    #[arg(long, default_value_t = 4)]
    tp: usize,
    /// Leave the optimizer's state out
    #[arg(long)]
    only_weights: bool,
}

/// A parameter: name, shape and how tensor parallelism cuts it.
type Parameter = (String, Vec<usize>, Option<Cut>);

fn parameters(arguments: &Arguments) -> Vec<Parameter> {
    let (h, mut all) = (arguments.hidden, Vec::new());
    let mut add = |name: String, shape: &[usize], cut: Option<Cut>| {
        all.push((name, shape.to_vec(), cut));
    };
    let tokens = Cut::new(0, [arguments.vocab]);
    add("wte.weight".to_owned(), &[arguments.vocab, h], Some(tokens));
    add("wpe.weight".to_owned(), &[1024, h], None);
    add("ln_f.weight".to_owned(), &[h], None);
    add("ln_f.bias".to_owned(), &[h], None);
    for layer in 0..arguments.layers {
        let mut add =
            |name: &str, shape: &[usize], cut| add(format!("h.{layer}.{name}"), shape, cut);
        for norm in ["ln_1", "ln_2"] {
            add(&format!("{norm}.weight"), &[h], None);
            add(&format!("{norm}.bias"), &[h], None);
        }
        add("attn.c_attn.weight", &[h, 3 * h], Some(Cut::new(1, [h; 3])));
        add("attn.c_attn.bias", &[3 * h], Some(Cut::new(0, [h; 3])));
        add("attn.c_proj.weight", &[h, h], Some(Cut::new(0, [h])));
        add("attn.c_proj.bias", &[h], None);
        add("mlp.c_fc.weight", &[h, 4 * h], Some(Cut::new(1, [4 * h])));
        add("mlp.c_fc.bias", &[4 * h], Some(Cut::new(0, [4 * h])));
        add("mlp.c_proj.weight", &[4 * h, h], Some(Cut::new(0, [4 * h])));
        add("mlp.c_proj.bias", &[h], None);
    }
    all
}

/// The `config.json` of Hugging Face for such a model.
fn config(arguments: &Arguments) -> String {
    let Arguments {
        layers,
        hidden,
        vocab,
        ..
    } = arguments;
    format!(
        r#"{{"model_type":"gpt2","n_layer":{layers},"n_embd":{hidden},"n_head":16,"n_positions":1024,"vocab_size":{vocab}}}
"#
    )
}

/// Bytes that no two tensors share, and that nothing can compress.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0_u64;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    (0..len.div_ceil(8))
        .flat_map(|_| next().to_le_bytes())
        .collect()
}

/// Writes some kinds of values of each parameter that a rank owns as one file.
fn write(
    draft: &Draft,
    file: ShardKind,
    kinds: &[Kind],
    (rank, tp): (usize, usize),
    parameters: &[Parameter],
    noise: &[u8],
) -> Result<Shard> {
    let mut layouts = Vec::new();
    for (name, shape, cut) in parameters {
        let layout = match cut {
            Some(cut) => cut.layout(shape, rank, tp)?,
            None if rank > 0 => continue,
            None => Layout::whole(shape),
        };
        layouts.push((name, layout));
    }
    let pairs = kinds
        .iter()
        .flat_map(|kind| layouts.iter().map(move |layout| (kind, layout)));
    let pieces: Vec<_> = pairs
        .enumerate()
        .map(|(number, (kind, (name, layout)))| {
            let piece = Piece {
                kind,
                name,
                dtype: DType::F32,
                layout,
                range: None,
            };
            // A window of its own for each.
            let begin = 8 * (number * kinds.len() + rank);
            let end = begin + piece.num_bytes();
            (piece, &noise[begin..end])
        })
        .collect();
    draft.write_shard(file, rank, &pieces)
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let parameters = parameters(&arguments);
    let local = |(_, shape, cut): &Parameter| {
        let degree = if cut.is_some() { arguments.tp } else { 1 };
        shape.iter().product::<usize>().div_ceil(degree)
    };
    let largest = parameters.iter().map(local).max().unwrap_or(0);
    let noise = noise(4 * largest + (1 << 22));
    let state = ["adamw.exp_avg", "adamw.exp_avg_sq"].map(Kind::optimizer);
    let draft = Store::in_output_dir(&arguments.folder).begin(1000)?;
    let mut shards = Vec::new();
    for rank in 0..arguments.tp {
        let place = (rank, arguments.tp);
        let files = [
            (ShardKind::Model, &[Kind::Parameter][..]),
            (ShardKind::Optimizer, &state),
        ];
        let count = if arguments.only_weights { 1 } else { 2 };
        for (file, kinds) in files.into_iter().take(count) {
            shards.push(write(&draft, file, kinds, place, &parameters, &noise)?);
        }
    }
    let topology = Topology {
        tp: arguments.tp,
        ..Topology::default()
    };
    let header = Header {
        topology,
        ..Header::default()
    };
    let config = config(&arguments);
    draft.commit(shards, header, &[("config.json", config.as_bytes())])?;
    Ok(())
}
