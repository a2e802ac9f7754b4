//! Keys, options and commands, listed and explained.

use insta::assert_snapshot;

use super::Workplace;

#[test]
fn the_configuration_tells_where_each_value_came_from() {
    let place = Workplace::new();
    let document = place.document("config merak.toml --json --tp 2");
    assert_eq!(document["tp"]["value"], 2);
    assert_eq!(document["tp"]["origin"], "command line --tp");
    assert_eq!(
        document["seq_length"]["origin"].as_str().unwrap(),
        "merak.toml:2"
    );
    assert_eq!(document["pp"]["origin"], "default");
    assert_eq!(place.document("config merak.toml --tp 2 --json"), document);
    let table = place.succeed("config merak.toml --tp 2");
    let rows: Vec<_> = table
        .lines()
        .filter(|line| line.starts_with("tp ") || line.starts_with("max_steps "))
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    assert_snapshot!(rows.join("\n"), @r"
    tp 2 command line --tp
    max_steps 5 merak.toml:3
    ");
}

#[test]
fn every_key_is_listed_with_its_type_default_and_meaning() {
    let place = Workplace::new();
    let listed = place.succeed("config --help-keys");
    for key in merak_trainer::keys() {
        assert!(
            listed.contains(&format!("\n{} = ", key.name)),
            "{}",
            key.name
        );
        assert!(listed.contains(key.doc), "{}", key.doc);
    }
    assert_eq!(place.succeed("config --help_keys"), listed);
    assert_eq!(
        place.succeed("config merak.toml --tp 2 --help-keys"),
        listed
    );
    let help = place.succeed("train --help");
    assert!(
        help.contains("`merak config --help-keys` lists them all"),
        "{help}"
    );
    assert_eq!(place.merak("config").status, Some(2));
    let narrow = merak_trainer::key_help(Some(80));
    assert!(
        narrow.lines().all(|line| line.chars().count() <= 80),
        "{narrow}"
    );
}

#[test]
fn the_page_of_keys_is_what_the_code_says() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/KEYS.md");
    let page = merak_trainer::key_page();
    if std::env::var_os("UPDATE_KEYS").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    assert!(
        std::fs::read_to_string(path).unwrap_or_default() == page,
        "run `UPDATE_KEYS=1 cargo test -p merak-trainer --test it the_page_of_keys`"
    );
}

#[test]
fn options_of_every_command_are_taken_with_dashes_and_with_underscores() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 1");
    let texts = [
        "generate run --prompt-ids 5,6 --max-new-tokens 3 --top-k 1 --json",
        "generate run --prompt_ids 5,6 --max_new_tokens 3 --top_k 1 --json",
        "generate run --prompt_ids=5,6 --max_new_tokens=3 --top_k=1 --json",
    ];
    let texts = texts.map(|line| place.succeed(line));
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    let dry = "train merak.toml --max-steps 2 --resume-from-checkpoint latest";
    let plan = place.succeed(&format!("{dry} --dry-run"));
    assert_eq!(place.succeed(&format!("{dry} --dry_run")), plan);
    assert_eq!(
        place.succeed("train merak.toml --dry_run --max_steps 2 --resume latest"),
        plan
    );
    place.succeed("bench gpt --layers 1 --hidden 8 --heads 1 --seq 4 --vocab 16 --steps 1 --batch 8 --virtual_stages 1");
}

#[test]
fn completions_and_help_are_printed() {
    let place = Workplace::new();
    let bash = place.succeed("completions bash");
    assert!(bash.contains("_merak()") && bash.contains("--dry-run"));
    assert_snapshot!(place.succeed("--help"), @r#"
    Trains and fine-tunes transformer models with data, tensor and pipeline parallelism

    Usage: merak [OPTIONS] <COMMAND>

    Commands:
      train        Trains a model
      launch       Starts a command as several processes of this machine, one for each rank
      evaluate     Evaluates a checkpoint on the validation part of the data
      predict      Writes what a checkpoint says of each sample of the data, as JSON lines
      tokenize     Writes the tokens of the data into files that training reads by range
      plan         Plans a run without its data, or searches the degrees with the shortest step
      trace        Prints the graph of a model, as one rank runs it
      schedule     Prints a schedule and its figures, or checks one that is given as CSV
      config       Prints the resolved configuration and where each value came from
      generate     Continues prompts with a trained model
      doctor       Prints what this machine and this build can do, after a trial of two ranks
      bench        Measures this machine
      completions  Prints a completion script
      help         Print this message or the help of the given subcommand(s)

    Options:
          --log <FILTER>  What to log, as a tracing filter: `info`, `merak_trainer=debug` [env:
                          MERAK_LOG=] [default: warn,merak_mpu=error]
      -h, --help          Print help
      -V, --version       Print version
    "#);
}
