//! The figures of the HTML page are those of the simulator.

use merak_pipe::{Costs, Schedule, ScheduleKind, Size, UnitCosts, html, simulate};
use std::{
    io::Write as _,
    process::{Command, Stdio},
};

/// Reads the page and a list of `[name, ranks, microbatches, costs]` as two lines, runs the page's own script
/// and prints the figures of each.
const DRIVER: &str = r#"
const [page, cases] = require("fs").readFileSync(0, "utf8").split("\n").map(line => JSON.parse(line));
const script = page.split("<script>")[1].split("</script>")[0];
const { find, simulate } = new Function(script + "; return { find, simulate };")();
console.log(JSON.stringify(cases.map(([name, P, M, costs]) => {
  const { spans, memory, ...figures } = simulate(find(name, P, M), costs);
  return figures;
})));
"#;

/// The figures that the page shows, or `None` where there is no node to run its script.
fn figures(page: &str, cases: &serde_json::Value) -> Option<serde_json::Value> {
    let node = Command::new("node")
        .args(["-e", DRIVER])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let mut node = node.ok()?;
    let input = format!("{}\n{cases}", serde_json::json!(page));
    let mut stdin = node.stdin.take().expect("it was piped");
    stdin.write_all(input.as_bytes()).expect("node reads");
    drop(stdin);
    let output = node.wait_with_output().expect("node ends");
    assert!(output.status.success(), "the script fails");
    Some(serde_json::from_slice(&output.stdout).expect("it prints JSON"))
}

fn close(found: &serde_json::Value, expected: &[f64]) -> bool {
    let found = found.as_array().expect("a list");
    let mut pairs = found.iter().zip(expected);
    found.len() == expected.len()
        && pairs.all(|(a, b)| (a.as_f64().expect("a number") - b).abs() < 1e-9)
}

#[test]
fn the_page_shows_the_figures_of_the_simulator() {
    let given = Schedule::from_csv(
        "</script>",
        "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1I1,1W1\n",
        Size::new(2, 2),
    )
    .unwrap();
    let page = html(&given, UnitCosts::default()).unwrap();
    assert_eq!(
        page.matches("</script>").count(),
        1,
        "a name cannot end the script"
    );

    let costs = ["F=1,I=1,W=1,R=1,C=0", "F=1,I=1.3,W=0.7,R=0.6,C=0.25"];
    let mut cases = vec![(given, "given", costs[0])];
    for kind in ScheduleKind::ALL {
        let chunks = kind.fixed_chunks().unwrap_or(2);
        for (p, m) in [(1, 2), (2, 5), (4, 8), (8, 16)] {
            let size = Size::new(p, m.max(kind.min_microbatches(p))).with_chunks(chunks);
            let schedule = kind.generate(size).unwrap();
            cases.extend(costs.map(|costs| (schedule.clone(), kind.as_str(), costs)));
        }
    }
    let asked = cases.iter().map(|(schedule, name, costs)| {
        let entries = costs
            .split(',')
            .map(|entry| entry.split_once('=').expect("a cost"));
        let costs: serde_json::Map<_, _> = entries
            .map(|(key, value)| {
                (
                    key.to_owned(),
                    value.parse::<f64>().expect("a number").into(),
                )
            })
            .collect();
        serde_json::json!([name, schedule.size.ranks, schedule.size.microbatches, costs])
    });
    let asked = serde_json::Value::Array(asked.collect());
    let Some(shown) = figures(&page, &asked) else {
        eprintln!("skipped: there is no node here to run the page's script");
        return;
    };
    for ((schedule, name, costs), shown) in cases.iter().zip(shown.as_array().unwrap()) {
        let at = format!("{name} {:?} {costs}", schedule.size);
        let costs = Costs::uniform(costs.parse().unwrap(), schedule.size.stages());
        let expected = simulate(schedule, &costs).unwrap();
        let single = serde_json::json!([
            shown["makespan"],
            shown["bubble"],
            shown["longest_rank_time"]
        ]);
        let figures = [
            expected.makespan,
            expected.bubble(),
            expected.longest_rank_time(),
        ];
        assert!(close(&single, &figures), "{at}: {single} {figures:?}");
        assert!(
            close(
                &shown["bubble_by_rank"],
                &expected.timeline.bubble_by_rank()
            ),
            "{at}"
        );
        assert!(
            close(&shown["peak_activations"], &expected.peak_activations),
            "{at}"
        );
        assert_eq!(
            shown["critical_path"],
            serde_json::json!(expected.critical_path),
            "{at}"
        );
    }
}
