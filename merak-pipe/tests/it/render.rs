//! What users read.

use merak_pipe::{
    Costs, GridStyle, Schedule, ScheduleKind, Size, UnitCosts, grid, json, simulate, svg, trace,
};

fn drawn(schedule: &Schedule, costs: &str, style: GridStyle) -> String {
    let costs: UnitCosts = costs.parse().expect("the costs are well formed");
    let costs = Costs::uniform(costs, schedule.size.stages());
    let simulation = simulate(schedule, &costs).expect("the schedule is valid");
    grid(&simulation.timeline, style)
}

#[test]
fn the_grid_shows_who_waits() {
    let schedule = ScheduleKind::ShiftedCriticalPath
        .generate(Size::new(4, 4))
        .unwrap();
    insta::assert_snapshot!(drawn(&schedule, "F=1,R=1", GridStyle::default()), @"
    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0------ R1 B1--- R2 B2--- R3 B3---
    rank 1  .  F0 F1 F2 R0 .  .  .  B0--- F3 B1------ R2 B2--- R3 B3--- .  .
    rank 2  .  .  F0 F1 F2 R0 B0--- R1 B1--- F3 B2------ B3------ .  .  .  .
    rank 3  .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .  .  .  .
    ");
}

#[test]
fn the_grid_names_stages_where_a_rank_has_several() {
    let csv = "0F0,3F0,3I0,3W0,0I0,0W0\n1F0,2F0,2I0,1I0,2W0,1W0\n";
    let schedule = Schedule::from_csv("v", csv, Size::new(2, 1).with_chunks(2)).unwrap();
    insta::assert_snapshot!(drawn(&schedule, "F=1", GridStyle::default()), @"
    rank 0  0F0 .   .   3F0 3I0---- 3W0 .   .   .   0I0---- 0W0
    rank 1  .   1F0 2F0 .   .   .   2I0---- 1I0---- 2W0 1W0 .
    ");
}

#[test]
fn a_long_grid_is_folded_into_windows_of_time() {
    let schedule = ScheduleKind::OneFOneB.generate(Size::new(4, 16)).unwrap();
    let whole = drawn(&schedule, "R=0", GridStyle::default());
    let style = GridStyle {
        columns: Some(80),
        ..GridStyle::default()
    };
    let folded = drawn(&schedule, "R=0", style);
    assert!(folded.lines().all(|line| line.len() <= 80), "{folded}");
    assert!(folded.starts_with("time 0 to 18\nrank 0  F0-"), "{folded}");
    let of_rank = |text: &str| {
        let rows = text
            .lines()
            .filter_map(|line| line.strip_prefix("rank 1  "));
        let rows = rows
            .flat_map(|row| row.split([' ', '-']))
            .filter(|cell| !cell.is_empty());
        rows.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(of_rank(&folded), of_rank(&whole));
    let narrow = GridStyle {
        columns: Some(1),
        ..style
    };
    assert!(drawn(&schedule, "R=0", narrow).contains("rank 3"));
}

#[test]
fn a_picture_has_no_control_characters_of_a_name() {
    let schedule = ScheduleKind::OneFOneB.generate(Size::new(2, 2)).unwrap();
    let simulation = simulate(&schedule, &Costs::uniform(UnitCosts::default(), 2)).unwrap();
    let schedule = Schedule {
        name: "a\u{1b}[31m<b".into(),
        ..schedule
    };
    let picture = svg(&schedule, &simulation);
    assert!(picture.contains(">a[31m&lt;b</text>"), "{picture}");
}

#[test]
fn a_long_run_gets_more_time_per_cell() {
    let schedule = ScheduleKind::OneFOneB.generate(Size::new(2, 100)).unwrap();
    let style = GridStyle {
        max_cells: 50,
        ..GridStyle::default()
    };
    let text = drawn(&schedule, "F=1", style);
    // Every action keeps a cell.
    assert!(text.contains("F99") && text.contains("B99"), "{text}");
}

#[test]
fn colour_is_asked_for() {
    let schedule = ScheduleKind::OneFOneB.generate(Size::new(2, 2)).unwrap();
    let plain = drawn(&schedule, "R=0", GridStyle::default());
    assert!(!plain.contains('\x1b'));
    let colour = drawn(
        &schedule,
        "R=0",
        GridStyle {
            colour: true,
            ..GridStyle::default()
        },
    );
    let mut stripped = String::new();
    for (index, part) in colour.split('\x1b').enumerate() {
        let text = part.split_once('m').map_or(part, |(_, text)| text);
        stripped.push_str(if index == 0 { part } else { text });
    }
    assert_eq!(stripped, plain);
}

#[test]
fn the_json_document_has_the_fields_of_the_command_line() {
    let schedule = ScheduleKind::OneFOneB.generate(Size::new(2, 2)).unwrap();
    let costs = Costs::uniform("R=0,C=0.5".parse().unwrap(), 2);
    let text = json(&schedule, &costs).unwrap();
    insta::assert_snapshot!(text, @r#"{"name":"1f1b","stages":2,"ranks":2,"microbatches":2,"chunks":1,"costs":{"F":1.0,"I":1.0,"W":1.0,"R":0.0,"C":0.5,"O":1.0},"actions":[["0F0","0F1","0B0","0B1"],["1F0","1B0","1F1","1B1"]],"instructions":[[["LoadMicroBatch",{"buffer_id":0}],["ForwardPass",{"buffer_id":0}],["SendActivation",{"buffer_id":0}],["LoadMicroBatch",{"buffer_id":1}],["ForwardPass",{"buffer_id":1}],["SendActivationRecvGrad",{"buffer_id":[1,0]}],["BackwardPass",{"buffer_id":0}],["RecvGrad",{"buffer_id":1}],["BackwardPass",{"buffer_id":1}],["ReduceTiedGrads",{}],["ReduceGrads",{}],["OptimizerStep",{}]],[["RecvActivation",{"buffer_id":0}],["LoadMicroBatch",{"buffer_id":0}],["ForwardPass",{"buffer_id":0}],["BackwardPass",{"buffer_id":0}],["SendGradRecvActivation",{"buffer_id":[0,1]}],["LoadMicroBatch",{"buffer_id":1}],["ForwardPass",{"buffer_id":1}],["BackwardPass",{"buffer_id":1}],["SendGrad",{"buffer_id":1}],["ReduceTiedGrads",{}],["ReduceGrads",{}],["OptimizerStep",{}]]],"makespan":10.0,"bubble":0.4,"longest_rank_time":10.0,"bubble_by_rank":[0.4,0.0],"peak_activations":[2.0,1.0],"critical_path":["0F0","1F0","1B0","1F1","1B1","0B1"]}"#);
}

#[test]
fn a_recorded_timeline_is_drawn_like_a_simulated_one() {
    let span = |text: &str, start, end| merak_pipe::Span {
        action: text.parse().unwrap(),
        start,
        end,
    };
    let timeline = merak_pipe::Timeline {
        ranks: vec![
            vec![span("0F0", 0.01, 0.019), span("0B0", 0.051, 0.07)],
            vec![span("1F0", 0.021, 0.03), span("1B0", 0.0301, 0.0499)],
        ],
    };
    insta::assert_snapshot!(grid(&timeline, GridStyle::default()), @"
    rank 0  .  F0 .  .  .  .  B0---
    rank 1  .  .  F0 B0------ .  .
    ");
    assert_eq!(
        grid(&merak_pipe::Timeline::default(), GridStyle::default()),
        ""
    );
}

#[test]
fn a_picture_draws_every_action_once_and_names_the_schedule() {
    let schedule = ScheduleKind::ZbV
        .generate(Size::new(3, 6).with_chunks(2))
        .unwrap();
    let simulation = simulate(&schedule, &Costs::uniform(UnitCosts::default(), 6)).unwrap();
    let picture = svg(&schedule, &simulation);
    for action in schedule.actions.iter().flatten() {
        let title = format!("<title>{action}: ");
        assert_eq!(picture.matches(&title).count(), 1, "{action}");
    }
    // Each critical action is outlined.
    let outlines = picture.split("<path class=\"c\"").skip(1);
    let outlined = outlines.map(|path| path.split("/>").next().unwrap_or("").matches('M').count());
    assert_eq!(outlined.sum::<usize>(), simulation.critical_path.len());
    let hostile = Schedule {
        name: "<script>&".into(),
        ..schedule
    };
    assert!(svg(&hostile, &simulation).contains("&lt;script&gt;&amp;"));
}

#[test]
fn a_trace_has_an_event_for_every_action() {
    let schedule = ScheduleKind::PreRecompute
        .generate(Size::new(3, 4))
        .unwrap();
    let simulation = simulate(&schedule, &Costs::uniform(UnitCosts::default(), 3)).unwrap();
    let text = trace(&simulation.timeline);
    let document: serde_json::Value = serde_json::from_str(&text).unwrap();
    let events = document["traceEvents"].as_array().unwrap();
    let spans: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    assert_eq!(spans.len(), schedule.actions.iter().flatten().count());
    let end =
        |event: &&serde_json::Value| event["ts"].as_f64().unwrap() + event["dur"].as_f64().unwrap();
    let last = spans.iter().map(end).fold(0.0, f64::max);
    assert!((last - 1e6 * simulation.makespan).abs() < 1.0);
}

#[test]
fn the_picture_of_many_actions_stays_small_and_its_bars_apart() {
    for kind in ScheduleKind::ALL {
        let chunks = kind.fixed_chunks().unwrap_or(3);
        let schedule = kind
            .generate(Size::new(32, 128).with_chunks(chunks))
            .unwrap();
        let costs = Costs::uniform(kind.default_costs(), schedule.size.stages());
        let simulation = simulate(&schedule, &costs).unwrap();
        let picture = svg(&schedule, &simulation);
        assert!(picture.len() < 1_000_000, "{kind}: {} bytes", picture.len());
        // One shape for each rank and colour instead of a bar for each action.
        assert!(!picture.contains("<title>"), "{kind}");
    }
}

#[test]
fn a_picture_tells_three_stages_of_a_rank_apart_and_has_a_time_axis() {
    let size = Size::new(2, 4).with_chunks(3);
    let schedule = ScheduleKind::Interleaved.generate(size).unwrap();
    let costs = Costs::uniform(ScheduleKind::Interleaved.default_costs(), 6);
    let picture = svg(&schedule, &simulate(&schedule, &costs).unwrap());
    let fill = |action: &str| {
        let (before, _) = picture.split_once(&format!("<title>{action}:")).unwrap();
        let (_, fill) = before.rsplit_once("fill=\"").unwrap();
        fill[..7].to_owned()
    };
    let fills = [fill("0F0"), fill("2F0"), fill("4F0")];
    assert!(fills[0] != fills[1] && fills[1] != fills[2], "{fills:?}");
    assert_eq!(fill("0F0"), fill("1F0"));
    assert!(picture.contains(">4B3</text>"), "labels name the stage");
    assert!(
        picture.contains("<path class=\"a\"") && picture.contains(">10</text>"),
        "{picture}"
    );
    assert!(picture.contains("prefers-color-scheme:dark"));
}
