//! How files, the environment and the command line are read, and which of them wins.

use insta::assert_snapshot;
use merak_trainer::{Config, TokenizerSource};
use serde_json::json;

use super::{file, load_file, load_line, message};

#[test]
fn a_later_layer_wins_and_each_value_keeps_its_origin() {
    let file = file(
        "merak.toml",
        "# comment\ntp = 2\npp = 2\ndp = 2\n\n[data]\nmax_bytes = 5e8\n",
    );
    let environment = [
        ("MERAK_PP", "4"),
        ("MERAK_TP", "4"),
        ("MERAK_LOG", "debug"),
        ("PATH", "/bin"),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()));
    let line = ["--tp=8", "--save"].map(String::from);
    let config = Config::load(Some(&file.path), environment, &line).unwrap();
    let arguments = config.arguments();
    assert_eq!(
        (arguments.dp, arguments.pp, arguments.tp, arguments.save),
        (2, 4, 8, Some(true))
    );
    assert_eq!(arguments.data.max_bytes, Some(500_000_000));
    let origin = |key| config.origin(key).to_string();
    assert!(origin("dp").ends_with("merak.toml:4"));
    assert!(origin("data.max_bytes").ends_with("merak.toml:7"));
    assert_eq!(origin("pp"), "environment MERAK_PP");
    assert_eq!(origin("tp"), "command line --tp");
    assert_eq!(origin("seed"), "default");
    assert!(
        config
            .explain(None)
            .lines()
            .any(|line| line.starts_with("pp ") && line.ends_with("MERAK_PP"))
    );
}

#[test]
fn a_later_table_replaces_the_earlier_one_whole() {
    let file = file("merak.toml", "[lr_scales]\nwte = 0.5\nwpe = 0.5\n");
    let environment = [("MERAK_LR_SCALES".to_owned(), r#"{"h": 2}"#.to_owned())];
    let config = Config::load(Some(&file.path), environment, &[]).unwrap();
    let explained = &config.to_json()["lr_scales"];
    assert_eq!(explained["value"], json!({"h": 2.0}));
    assert_eq!(explained["origin"], "environment MERAK_LR_SCALES");
    let alone = Config::load(Some(&file.path), [], &[]).unwrap();
    assert!(alone.origin("lr_scales").to_string().ends_with(":1"));
    // A section of the command line gives typed tables, as a file does.
    let file = self::file("merak.toml", "data.tokenizer.train_bpe = 1\n");
    let line = [r#"--data={"tokenizer": "bytes"}"#.to_owned()];
    assert_snapshot!(message(Config::load(Some(&file.path), [], &line)), @r#""data.tokenizer.train_bpe" expects an integer from 257 to 1048576, found 1 (merak.toml:1)"#);
}

#[test]
fn a_wrong_value_is_refused_though_a_later_one_replaces_it() {
    let file = file("merak.toml", "tp = 1.5\n");
    let line = ["--tp=2".to_owned()];
    assert_snapshot!(message(Config::load(Some(&file.path), [], &line)), @r#""tp" expects an integer of at least 1, found 1.5 (merak.toml:1)"#);
    assert_snapshot!(message(load_line("--tp true --tp 2")), @r#""tp" expects an integer of at least 1, found true (command line --tp)"#);
    assert_snapshot!(message(load_line("--data={\"max_bytes\":\"5\"}")), @r#""data.max_bytes" expects an integer of at least 1 or none, found "5" (command line --data)"#);
}

#[test]
fn yaml_values_keep_their_types_lines_and_aliases() {
    let text = "lr_scales: &scales {wte: 0.5}\ndata: {max_bytes: 0x10}\nseed: !!int 7\nlayerwise_lr_decay: .inf\n";
    assert_snapshot!(message(load_file("merak.yaml", text)), @r#""layerwise_lr_decay" expects a number of more than 0 and at most 1, found ".inf" (merak.yaml:4)"#);
    let text = text.replace(".inf", "1.0") + "lr_scheduler_kwargs: *scales\n";
    assert_snapshot!(message(load_file("merak.yaml", &text)).split(',').next_back().expect("a place"), @r#" found {"wte":0.5} (merak.yaml:5)"#);
    assert_snapshot!(message(load_file("merak.yaml", "tp: 1\n---\ntp: 2\n")), @"cannot parse the configuration merak.yaml: more than one YAML document");
    assert_snapshot!(message(load_file("merak.yaml", "tp: 1\n[a]: 2\n")), @"cannot parse the configuration merak.yaml: the key with parts at line 2 is no string: put it in quotes");
    assert_snapshot!(message(load_file("merak.yaml", "? &k tp\n: 2\n? *k\n: 3\n")), @r#"cannot parse the configuration merak.yaml: duplicate key "tp" at line 3"#);
}

#[test]
fn input_paths_are_relative_to_the_file_that_names_them() {
    let text = "output_dir = 'runs'\n[data]\npath = 'text'\ntokenizer = 'tokenizer.json'\n";
    let file = file("merak.toml", text);
    let folder = file.path.parent().unwrap().to_path_buf();
    let config = Config::load(Some(&file.path), [], &[]).unwrap();
    let arguments = config.arguments();
    assert_eq!(
        arguments.data.path.as_ref().unwrap().first(),
        folder.join("text")
    );
    assert_eq!(
        arguments.data.tokenizer,
        TokenizerSource::File(folder.join("tokenizer.json"))
    );
    assert_eq!(arguments.output_dir, Some("runs".into()));
    let line = load_line("--data.path text").unwrap();
    let expected = std::path::absolute("text").unwrap();
    assert_eq!(
        line.arguments().data.path.as_ref().unwrap().first(),
        expected
    );
}

#[test]
fn bare_flags_and_lists_are_read_from_the_command_line() {
    let config = load_line(
        "--save --do-eval false --max_steps -1 --custom-split-points h.1,h.2 --col_para_list=[\"c_fc\"]",
    )
    .unwrap();
    let arguments = config.arguments();
    assert!(arguments.save == Some(true) && !arguments.do_eval);
    assert_eq!(arguments.max_steps, -1);
    assert_eq!(
        arguments.custom_split_points,
        Some(vec!["h.1".into(), "h.2".into()])
    );
    assert_eq!(
        arguments.tp_layer_lists.col_para_list,
        Some(vec!["c_fc".into()])
    );
}

#[test]
fn a_second_list_for_a_key_is_refused_and_no_items_are_lost() {
    assert_snapshot!(message(load_line("--data.path a --tp 2 --data.path=b")), @r#""data.path" is given twice (command line --data.path), and the second list would replace the first one: write --data.path a,b, or --set data.path=.. to replace it"#);
    assert_snapshot!(message(load_line("--col-para-list q --tp_layer_lists.col_para_list=[\"k\"]")), @r#""tp_layer_lists.col_para_list" is given twice (command line --tp_layer_lists.col_para_list), and the second list would replace the first one: write one list of all items, or --set tp_layer_lists.col_para_list=.. to replace it"#);
    // A value by `--set` replaces others as they come.
    for line in [
        "--data.path a --set data.path=b",
        "--set data.path=a --data.path b",
        "--set data.path=a --set data.path=b",
    ] {
        let config = load_line(line).unwrap();
        let paths = config.arguments().data.path.as_ref().unwrap();
        assert!(paths.count() == 1 && paths.first().ends_with("b"), "{line}");
    }
}

#[test]
fn a_damaged_command_line_or_file_is_one_clear_message() {
    assert_snapshot!(message(load_line("--tp")), @"the option --tp has no value: write --tp VALUE");
    assert_snapshot!(message(load_line("--tp --pp 2")), @"the option --tp has no value: write --tp VALUE");
    assert_snapshot!(message(load_line("--set tp")), @"the option --set tp has no value: write --set tp=VALUE");
    assert_snapshot!(message(load_line("tp=2")), @r#"unexpected argument "tp=2": keys are given as --KEY VALUE or --set KEY=VALUE"#);
    assert_snapshot!(message(load_file("merak.ini", "tp=2")), @"cannot tell the format of the configuration merak.ini: name it .toml, .yaml, .yml or .json");
    assert_snapshot!(message(load_file("merak.toml", "tp = 2\npp = \n")), @"cannot parse the configuration merak.toml: line 2: string values must be quoted, expected literal string");
    assert_snapshot!(message(load_file("merak.toml", "tp = 2\ntp = 3\n")), @r#"cannot parse the configuration merak.toml: line 2: duplicate key "tp""#);
    assert_snapshot!(message(load_file("merak.json", "[1]")), @"cannot parse the configuration merak.json: the file holds no table of keys");
    for (name, text) in [
        ("merak.yaml", "\u{feff}tp: 2\n"),
        ("merak.json", "\u{feff}{\"tp\": 2}"),
    ] {
        assert!(
            load_file(name, text).is_ok(),
            "{name} with a byte-order mark"
        );
    }
    assert_snapshot!(message(load_file("merak.yaml", "tp: [1\n")), @"cannot parse the configuration merak.yaml: while parsing a flow sequence, expected ',' or ']' at byte 7 line 2 column 1");
    assert_snapshot!(message(Config::load(Some("/nowhere/merak.toml".as_ref()), [], &[])), @"cannot read /nowhere/merak.toml");
}

#[test]
fn a_key_that_a_file_has_twice_is_named_with_its_line() {
    assert_snapshot!(message(load_file("merak.json", "{\n \"tp\": 1,\n \"tp\": 2\n}")), @r#"cannot parse the configuration merak.json: duplicate key "tp" at line 3 column 5"#);
    assert_snapshot!(message(load_file("merak.json", "{\"data\": {\n \"path\": \"a\",\n \"path\": \"b\"}}")), @r#"cannot parse the configuration merak.json: duplicate key "path" at line 3 column 7"#);
    assert_snapshot!(message(load_file("merak.json", "{\"data.path\": \"a\",\n \"data\": {\"path\": \"b\"}}")), @r#"cannot parse the configuration merak.json: duplicate key "data.path", in its section and beside it"#);
    assert_snapshot!(message(load_file("merak.yaml", "tp: 1\npp: 1\ntp: 2\n")), @r#"cannot parse the configuration merak.yaml: duplicate key "tp" at line 3"#);
    assert_snapshot!(message(load_file("merak.yaml", "data:\n  path: a\n  path: b\n")), @r#"cannot parse the configuration merak.yaml: duplicate key "path" at line 3"#);
    assert_snapshot!(message(load_file("merak.yaml", "lr_scheduler_kwargs: {power: 1, power: 2}\n")), @r#"cannot parse the configuration merak.yaml: duplicate key "power" at line 1"#);
    assert_snapshot!(message(load_file("merak.toml", "[data]\npath = 'a'\npath = 'b'\n")), @r#"cannot parse the configuration merak.toml: line 3: duplicate key "path""#);
    assert_snapshot!(message(load_line("--lr_scheduler_kwargs={\"power\":1,\"power\":2}")), @r#""lr_scheduler_kwargs" expects a table of `num_cycles` (a number of more than 0, under cosine_with_restarts a whole one), `power` (a number of more than 0), `lr_end` (a number of at least 0 and below the learning rate), `timescale` (an integer of at least 1), `num_decay_steps` (an integer of at least 0), `min_lr_ratio` (a number from 0 to 1), `decay_type` (cosine, linear or 1-sqrt), found "{"power":1,"power":2}" (duplicate key "power" at line 1 column 18) (command line --lr_scheduler_kwargs)"#);
    assert_snapshot!(message(load_line("--tp 1 --tp 2")), @"no error");
}
