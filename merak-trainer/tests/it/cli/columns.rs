//! What is written to a terminal fits its columns.

use super::{Workplace, terminal};

#[test]
fn lines_of_plans_and_summaries_fit_a_terminal_of_80_columns() {
    let place = Workplace::new();
    let long = "model.hf_dir";
    let lines = [
        "train merak.toml --max_steps 3 --pp 2 --dp 2 --tp 2 --train_schedule auto",
        "train merak.toml --max_steps 3 --resume latest --save false",
        "config merak.toml --model.config model.json --data.path text --tp 2",
    ];
    for line in lines {
        let shown = on_terminal(&place, line, 80);
        // Paths and commands stay whole.
        let is_too_long = |line: &&str| line.chars().count() > 80 && !line.contains('/');
        assert_eq!(shown.lines().find(is_too_long), None, "{line}: {shown}");
        assert!(
            shown.contains("ranks     ") || shown.contains(long),
            "{shown}"
        );
    }
}

#[test]
fn lines_of_progress_fit_a_terminal_without_bars() {
    let place = Workplace::new();
    let mut command = place.command("train merak.toml --max_steps 2 --save_steps 1");
    command.env("TERM", "dumb");
    let (ended, shown) = terminal::shown(command, 40, true);
    assert!(ended.success(), "{shown}");
    let is_whole = |line: &str| line.starts_with("step 2/2  loss ") && line.ends_with(" left");
    assert!(!shown.lines().any(is_whole), "{shown}");
    let lines = || {
        shown
            .lines()
            .skip_while(|line| !line.starts_with("step 2/2  loss "))
    };
    assert!(
        lines()
            .next()
            .is_some_and(|line| line.chars().count() <= 40),
        "{shown}"
    );
    assert!(
        lines()
            .nth(1)
            .is_some_and(|line| line.starts_with("          ")),
        "{shown}"
    );
}

#[test]
fn messages_are_folded_on_a_terminal_and_whole_elsewhere() {
    let place = Workplace::new();
    for line in [
        "train merak.toml --dry-run --sgd_momentum 5 --set learning_rate=0.1 --adapter_name a.b",
        "train merak.toml --dry-run --warmup_steps 9 --max_grad_norm -1 --tp 4",
        "schedule 1f1b -p 4 -m 4 --format neither-of-the-formats-that-are-known-to-it",
    ] {
        let whole = place.merak(line).stderr;
        assert!(whole.lines().any(|line| line.len() > 80), "{whole}");
        let mut command = place.command(line);
        command.env("NO_COLOR", "1");
        let (ended, shown) = terminal::shown(command, 80, true);
        assert_eq!(ended.code(), Some(2), "{shown}");
        assert_eq!(shown.lines().find(|line| line.chars().count() > 80), None);
        assert!(shown.contains(&format!("\n{:10}", "")), "{shown}");
        let words = |text: &str| {
            let words = text
                .split_whitespace()
                .filter(|word| !word.starts_with("20"));
            words.map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(words(&shown), words(&whole));
    }
}

#[test]
fn graphs_and_configurations_fit_a_terminal() {
    let place = Workplace::new();
    for (line, columns) in [
        ("trace merak.toml --tp 2 --pp 2 --stage 1", 80),
        ("config merak.toml --tp 2", 40),
    ] {
        let shown = on_terminal(&place, line, columns);
        let is_too_long =
            |line: &&str| line.chars().count() > columns.into() && !line.contains('/');
        assert_eq!(shown.lines().find(is_too_long), None, "{line}");
    }
}

/// What a command that succeeds writes to a terminal with that number of columns.
fn on_terminal(place: &Workplace, line: &str, columns: u16) -> String {
    let (ended, shown) = terminal::shown(place.command(line), columns, false);
    assert!(ended.success(), "merak {line}: {shown}");
    shown
}
