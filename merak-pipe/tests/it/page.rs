//! The figures of the HTML page are those of the simulator.

use merak_pipe::{
    ActivationBytes, Costs, PageOptions, Schedule, ScheduleKind, Simulation, Size, UnitCosts, html,
    simulate,
};
use std::{
    io::Write as _,
    process::{Command, Stdio},
};

/// The page of a schedule whose stages are alike.
fn page_of(schedule: &Schedule, costs: UnitCosts) -> String {
    let costs = Costs::uniform(costs, schedule.size.stages());
    html(schedule, &costs, &PageOptions::default()).expect("the sizes fit")
}

/// Reads the page and a list of `[name, ranks, microbatches, costs, bytes]` as two lines, runs the
/// page's own script and prints the figures of each.
const DRIVER: &str = r#"
const [page, cases] = require("fs").readFileSync(0, "utf8").split("\n").map(line => JSON.parse(line));
const script = page.split("<script>")[1].split("</script>")[0];
const { find, simulate } = new Function(script + "; return { find, simulate };")();
console.log(JSON.stringify(cases.map(([name, P, M, costs, bytes]) => {
  const { spans, memory, kept, ...figures } = simulate(find(name, P, M), costs, bytes);
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
        "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1I1,1W1,1F2,1B2\n",
        Size::new(2, 3),
    )
    .unwrap();
    let page = page_of(&given, UnitCosts::default());
    assert_eq!(
        page.matches("</script>").count(),
        1,
        "a name cannot end the script"
    );

    let costs = ["F=1,I=1,W=1,R=1,C=0", "F=1,I=1.3,W=0.7,R=0.6,C=0.25,O=0.7"];
    let mut cases = vec![
        (given.clone(), "given", costs[0]),
        (given, "given", costs[1]),
    ];
    for kind in ScheduleKind::ALL {
        let chunks = kind.default_chunks();
        for (p, m) in [(1, 2), (2, 5), (4, 8), (8, 16)] {
            let size = Size::new(p, m.max(kind.min_microbatches(p))).with_chunks(chunks);
            let schedule = kind.generate(size).unwrap();
            cases.extend(costs.map(|costs| (schedule.clone(), kind.as_str(), costs)));
        }
    }
    let asked = cases.iter().map(|(schedule, name, costs)| {
        let Size {
            ranks,
            microbatches,
            ..
        } = schedule.size;
        serde_json::json!([name, ranks, microbatches, as_json(costs)])
    });
    let asked = serde_json::Value::Array(asked.collect());
    let Some(shown) = figures(&page, &asked) else {
        eprintln!("skipped: there is no node here to run the page's script");
        return;
    };
    for ((schedule, name, costs), shown) in cases.iter().zip(shown.as_array().unwrap()) {
        let at = format!("{name} {:?} {costs}", schedule.size);
        let costs = Costs::uniform(costs.parse().unwrap(), schedule.size.stages());
        assert_shown(shown, &simulate(schedule, &costs).unwrap(), &at);
    }
}

/// Costs as the page's script takes them.
fn as_json(costs: &str) -> serde_json::Map<String, serde_json::Value> {
    let cost = |entry: &str| {
        let (name, value) = entry.split_once('=').expect("a cost");
        let value: f64 = value.parse().expect("a number");
        (name.to_owned(), value.into())
    };
    costs.split(',').map(cost).collect()
}

/// The figures of the page are those of a simulation.
fn assert_shown(shown: &serde_json::Value, expected: &Simulation, at: &str) {
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
    let idle = expected.timeline.bubble_by_rank();
    assert!(close(&shown["bubble_by_rank"], &idle), "{at}");
    let peaks = &expected.peak_activations;
    assert!(close(&shown["peak_activations"], peaks), "{at}");
    let path = serde_json::json!(expected.critical_path);
    assert_eq!(shown["critical_path"], path, "{at}");
}

/// Moves the page's own controls for each case and notes what its table then says.
const HANDS: &str = r##"<script>{
const set = (id, value) => {
  const input = document.getElementById(id);
  input.value = value;
  input.dispatchEvent(new Event("input"));
};
const told = CASES.map(([name, P, M, costs]) => {
  set("name", name);
  for (const [id, value] of Object.entries({ P, M, ...costs })) set(id, value);
  const cells = [...document.querySelectorAll("#figures tr")].map(row => [...row.cells].map(cell => cell.textContent));
  return { figures: Object.fromEntries(cells), boxes: document.querySelectorAll("#picture svg title").length };
});
document.title = JSON.stringify(told);
}</script>"##;

/// What a headless browser says of the page when this script has run, or `None` where there is
/// none.
fn seen(page: &str, hands: &str) -> Option<serde_json::Value> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("page.html");
    std::fs::write(&path, page.replace("</body>", &format!("{hands}</body>")))
        .expect("it is written");
    let profile = format!(
        "--user-data-dir={}",
        folder.path().join("profile").display()
    );
    let browser = Command::new("chromium")
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--dump-dom",
            &profile,
        ])
        .arg(format!("file://{}", path.display()))
        .stderr(Stdio::null())
        .output();
    let dom = String::from_utf8(browser.ok()?.stdout).expect("a page is text");
    let title = dom.split("<title>").nth(1)?.split("</title>").next()?;
    let title = title
        .replace("&gt;", ">")
        .replace("&lt;", "<")
        .replace("&amp;", "&");
    Some(serde_json::from_str(&title).expect("the script ran to its end"))
}

#[test]
fn a_browser_shows_the_figures_of_the_simulator() {
    let given = ScheduleKind::OneFOneB.generate(Size::new(4, 8)).unwrap();
    let page = page_of(&given, UnitCosts::default());
    let text = "F=1,I=1.25,W=0.75,R=0.5,C=0.25,O=0.75";
    let costs = serde_json::json!({"F": 1.0, "I": 1.25, "W": 0.75, "R": 0.5, "C": 0.25, "O": 0.75});
    let mut cases = Vec::new();
    for kind in ScheduleKind::ALL {
        for (p, m) in [(2, 5), (4, 8), (8, 16)] {
            let chunks = kind.default_chunks();
            let size = Size::new(p, m.max(kind.min_microbatches(p))).with_chunks(chunks);
            cases.push((kind, kind.generate(size).unwrap()));
        }
    }
    let asked = cases.iter().map(|(kind, schedule)| {
        serde_json::json!([
            kind.as_str(),
            schedule.size.ranks,
            schedule.size.microbatches,
            costs
        ])
    });
    let hands = HANDS.replace("CASES", &asked.collect::<serde_json::Value>().to_string());
    let Some(shown) = seen(&page, &hands) else {
        eprintln!("skipped: there is no chromium here to show the page");
        return;
    };
    let rounded = |x: f64| ((x * 1000.0).round() / 1000.0).to_string();
    let listed = |list: &[f64], unit: &str| {
        let texts: Vec<_> = list.iter().map(|x| rounded(*x) + unit).collect();
        texts.join(", ")
    };
    for ((kind, schedule), shown) in cases
        .iter()
        .zip(shown.as_array().expect("one for each case"))
    {
        let costs = Costs::uniform(text.parse().unwrap(), schedule.size.stages());
        let expected = simulate(schedule, &costs).unwrap();
        let percent: Vec<_> = expected
            .timeline
            .bubble_by_rank()
            .iter()
            .map(|b| 100.0 * b)
            .collect();
        let figures = serde_json::json!({
            "makespan": rounded(expected.makespan),
            "bubble": rounded(100.0 * expected.bubble()) + " %",
            "longest rank": rounded(expected.longest_rank_time()),
            "bubble by rank": listed(&percent, " %"),
            "peak activations": listed(&expected.peak_activations, ""),
            "critical path": format!("{} actions", expected.critical_path.len()),
        });
        assert_eq!(shown["figures"], figures, "{kind} {:?}", schedule.size);
        let actions: usize = schedule.actions.iter().map(Vec::len).sum();
        assert_eq!(shown["boxes"], actions, "{kind} {:?}", schedule.size);
    }
}

/// Moves each slider of a page with a user's own schedule.
const SLIDERS: &str = r##"<script>{
const set = (id, value) => {
  const input = document.getElementById(id);
  input.value = value;
  input.dispatchEvent(new Event("input"));
};
const cell = name => [...document.querySelectorAll("#figures tr")].find(row => row.cells[0].textContent === name).cells[1].textContent;
const width = () => +document.querySelector("#picture svg").getAttribute("width");
const told = { name: $("name").value, dead: [...document.querySelectorAll("input")].filter(input => input.disabled).map(input => input.id) };
told.makespan = cell("makespan");
set("F", 2);
told.slower = cell("makespan");
set("F", 1);
set("M", 2);
told.fewer = cell("makespan");
told.boxes = document.querySelectorAll("#picture svg title").length;
const before = width();
set("zoom", 4);
told.zoomed = width() / before;
told.ticks = document.querySelectorAll("#picture .axis").length > 10;
told.scale = [...document.querySelectorAll("#names .scale")].map(text => text.textContent);
told.labels = [...document.querySelectorAll("#picture .on")].map(text => text.textContent).join(" ");
told.outlines = document.querySelectorAll("#picture .critical").length + " of " + cell("critical path");
set("P", 3);
told.other = $("name").value + " " + $("P").value;
set("name", "given");
told.back = $("P").value;
document.title = JSON.stringify(told);
}</script>"##;

#[test]
fn a_given_schedule_keeps_its_sliders_alive() {
    let csv = "0F0,0F1,0F2,1F0,1F1,1F2,1B0,1B1,1B2,0B0,0B1,0B2\n";
    let given = Schedule::from_sized_csv("mine", csv).unwrap();
    let page = page_of(&given, "R=0".parse().unwrap());
    let Some(shown) = seen(&page, SLIDERS) else {
        eprintln!("skipped: there is no chromium here to show the page");
        return;
    };
    let expected = serde_json::json!({
        "name": "given", "dead": [], "makespan": "18", "slower": "24", "fewer": "12", "boxes": 8, "zoomed": 4,
        "ticks": true, "scale": ["0", "2"], "labels": "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1", "outlines": "8 of 8 actions",
        "other": "interleaved_1f1b 3", "back": "1",
    });
    assert_eq!(shown, expected);
}

#[test]
fn a_named_schedule_of_the_pages_size_is_shown_under_its_name() {
    let named = ScheduleKind::ZbV
        .generate(Size::new(4, 8).with_chunks(2))
        .unwrap();
    let page = page_of(&named, ScheduleKind::ZbV.default_costs());
    let script = r#"<script>document.title = JSON.stringify([$("name").value, $("R").value, (() => {
      $("name").value = "1f1b";
      $("name").dispatchEvent(new Event("input"));
      return $("R").value;
    })()]);</script>"#;
    if let Some(shown) = seen(&page, script) {
        assert_eq!(shown, serde_json::json!(["zb_v", "0", "1"]));
    }
}

#[test]
fn each_schedule_of_the_page_recomputes_as_it_does_unless_the_cost_is_named() {
    // A size beyond those that the page has by name.
    let size = Size::new(2, 20);
    let script = r#"<script>document.title = JSON.stringify([$("name").value, ...["zb_h1", "1f1b", "given"].map(name => {
      $("name").value = name;
      $("name").dispatchEvent(new Event("input"));
      return $("R").value;
    })]);</script>"#;
    for (is_recompute_named, costs, expected) in [
        (false, "R=1", ["given", "0", "1", "1"]),
        (false, "R=0.5", ["given", "0", "1", "0.5"]),
        (true, "R=1", ["given", "1", "1", "1"]),
        (true, "R=0", ["given", "0", "0", "0"]),
    ] {
        let schedule = ScheduleKind::OneFOneB.generate(size).unwrap();
        let costs = Costs::parse(costs, UnitCosts::default(), 2).unwrap();
        let options = PageOptions {
            is_recompute_named,
            ..PageOptions::default()
        };
        let page = html(&schedule, &costs, &options).unwrap();
        let Some(shown) = seen(&page, script) else {
            eprintln!("skipped: there is no chromium here to show the page");
            return;
        };
        assert_eq!(shown, serde_json::json!(expected), "{is_recompute_named}");
    }
}

#[test]
fn bars_of_one_width_all_have_a_label_or_none() {
    let size = Size::new(2, 12).with_chunks(3);
    let schedule = ScheduleKind::Interleaved.generate(size).unwrap();
    let page = page_of(&schedule, "R=0,I=0.5,W=0.5".parse().unwrap());
    let script = r##"<script>document.title = JSON.stringify([1, 2, 3, 4].map(zoom => {
      $("zoom").value = zoom;
      $("zoom").dispatchEvent(new Event("input"));
      return ["#picture rect[fill]", "#picture .on"].map(bars => document.querySelectorAll(bars).length);
    }));</script>"##;
    let Some(shown) = seen(&page, script) else {
        eprintln!("skipped: there is no chromium here to show the page");
        return;
    };
    // Labels such as 0F3 and 5B11: every bar lasts as long.
    let counts: Vec<[usize; 2]> = serde_json::from_value(shown).unwrap();
    assert!(
        counts
            .iter()
            .all(|[bars, labels]| *bars == 144 && [0, 144].contains(labels)),
        "{counts:?}"
    );
    assert_eq!((counts[0][1], counts[3][1]), (0, 144), "{counts:?}");
}

/// Costs and bytes that differ from stage to stage.
fn uneven(stages: usize) -> (Costs, ActivationBytes) {
    let varied = |stages: usize, step: usize| -> Vec<f64> {
        let of = |stage: usize| 0.5 + (stage * step % 7) as f64 / 4.0;
        (0..stages).map(of).collect()
    };
    let bytes = |step: u64| -> Vec<u64> {
        let of = |stage| 100 + stage * step % 70;
        (0..stages as u64).map(of).collect()
    };
    let costs = Costs {
        forward: varied(stages, 3),
        input_grad: varied(stages, 5),
        weight_grad: varied(stages, 2),
        recompute: varied(stages, 4),
        hop: varied(stages - 1, 6),
        overlap: 0.8,
    };
    let bytes = ActivationBytes {
        until_input_grad: bytes(30),
        until_weight_grad: bytes(50),
    };
    (costs, bytes)
}

#[test]
fn the_page_uses_the_costs_and_the_bytes_of_each_stage() {
    let mut cases = Vec::new();
    for kind in ScheduleKind::ALL {
        for (p, m) in [(1, 2), (3, 6), (4, 8)] {
            let m = m.max(kind.min_microbatches(p));
            let size = Size::new(p, m).with_chunks(kind.default_chunks());
            cases.push((kind, kind.generate(size).unwrap()));
        }
    }
    let asked = cases.iter().map(|(kind, schedule)| {
        let (costs, bytes) = uneven(schedule.size.stages());
        let costs = serde_json::json!({
            "F": costs.forward, "I": costs.input_grad, "W": costs.weight_grad, "R": costs.recompute, "C": costs.hop,
            "O": costs.overlap,
        });
        let size = schedule.size;
        serde_json::json!([kind.as_str(), size.ranks, size.microbatches, costs, bytes])
    });
    let asked = serde_json::Value::Array(asked.collect());
    let page = page_of(&cases[0].1, UnitCosts::default());
    let Some(shown) = figures(&page, &asked) else {
        eprintln!("skipped: there is no node here to run the page's script");
        return;
    };
    for ((kind, schedule), shown) in cases.iter().zip(shown.as_array().unwrap()) {
        let (costs, bytes) = uneven(schedule.size.stages());
        let expected = simulate(schedule, &costs).unwrap();
        let at = format!("{kind} {:?}", schedule.size);
        let makespan = serde_json::json!([shown["makespan"]]);
        assert!(close(&makespan, &[expected.makespan]), "{at}: {makespan}");
        let path = serde_json::json!(expected.critical_path);
        assert_eq!(shown["critical_path"], path, "{at}");
        let peaks = schedule.peak_bytes_by_grad(&bytes).unwrap().into_iter();
        let peaks: Vec<_> = peaks
            .map(|peak| [peak.until_input_grad, peak.until_weight_grad])
            .collect();
        let peaks = serde_json::json!(peaks);
        assert_eq!(shown["peak_bytes_by_grad"], peaks, "{at}");
    }
}

/// Types lists into the fields of a page, moves a slider over one, and goes to another number of
/// stages.
const FIELDS: &str = r##"<script>{
const set = (id, value) => {
  const input = document.getElementById(id);
  input.value = value;
  input.dispatchEvent(new Event("input"));
};
const cell = name => [...document.querySelectorAll("#figures tr")].find(row => row.cells[0].textContent === name)?.cells[1].textContent;
const all = () => ["makespan", "peak bytes", "of them for I", "of them for W", "limit"].map(cell);
const told = { fields: ["Fs", "bytes", "limit"].map(id => $(id).value), first: all() };
set("F", 2.5);
told.slid = [$("Fs").value, cell("makespan")];
set("Fs", "1:1:1:1");
told.typed = [$("F").value, cell("makespan")];
for (const wrong of ["1e308", "1:1e16", "1:x"]) {
  set("Fs", wrong);
  told.wrong = [$("Fs").validity.valid, cell("makespan")];
  if (told.wrong[0]) break;
}
set("Fs", "1:3");
told.stretched = [cell("makespan"), $("parts").textContent];
set("limit", "2:2:2:1");
told.limit = cell("limit");
set("bytes", "");
told.without = all();
document.title = JSON.stringify(told);
}</script>"##;

#[test]
fn the_fields_of_the_page_take_a_number_for_each_stage() {
    let schedule = ScheduleKind::OneFOneB.generate(Size::new(4, 8)).unwrap();
    let defaults: UnitCosts = "R=0".parse().unwrap();
    let costs = Costs::parse("F=1:1:2:1", defaults, 4).unwrap();
    let memory = PageOptions {
        bytes: Some(ActivationBytes::parse("I=3145728,W=1048576", 4).unwrap()),
        peak_bytes: vec![16 << 20, 12 << 20, 8 << 20, 3 << 20],
        ..PageOptions::default()
    };
    let page = html(&schedule, &costs, &memory).unwrap();
    let Some(shown) = seen(&page, FIELDS) else {
        eprintln!("skipped: there is no chromium here to show the page");
        return;
    };
    let makespan = |forward: &str| {
        let costs = Costs::parse(forward, defaults, 4).unwrap();
        let makespan = simulate(&schedule, &costs).unwrap().makespan;
        makespan.to_string()
    };
    let expected = serde_json::json!({
        "fields": ["1:1:2:1", "I=3145728,W=1048576", "16777216B:12582912B:8388608B:3145728B"],
        "first": [
            makespan("F=1:1:2:1"), "16.0 MiB, 12.0 MiB, 8.00 MiB, 4.00 MiB", "12.0 MiB, 9.00 MiB, 6.00 MiB, 3.00 MiB",
            "4.00 MiB, 3.00 MiB, 2.00 MiB, 1.00 MiB", "exceeded on rank 3",
        ],
        "slid": ["2:2:4:2", makespan("F=2:2:4:2")],
        "typed": ["1", makespan("F=1")],
        "wrong": [false, makespan("F=1")],
        "stretched": [
            makespan("F=1:1:3:3"), "The lists are of 2 stages; each of these 4 takes the mean over its part of them.",
        ],
        "limit": "exceeded on rank 0, rank 1",
        "without": [makespan("F=1:1:3:3"), null, null, null, "exceeded on rank 0, rank 1"],
    });
    assert_eq!(shown, expected);
}
