//! `report.html`: one page about a run, which needs nothing beside it.

mod chart;

use std::{fmt::Write as _, sync::Arc};

use merak_ckpt::words::Bytes;
use merak_pipe::{Costs, Span, Timeline, simulate, timelines};
use serde_json::Value;

use self::chart::{Series, chart};
use super::{
    peak::{Flops, Peak, Percent},
    times::Readable,
};
use crate::{
    error::Result,
    memory::MemoryNeed,
    plan::{Plan, Prediction},
};

/// What the page says of a run whatever it records.
#[derive(Debug, Clone)]
pub struct Page {
    /// The run in a few words.
    pub title: String,
    /// The plan that runs.
    pub plan: Arc<Plan>,
    /// How long a step was to take, where times were known beforehand.
    pub prediction: Option<Prediction>,
    /// What the plan was made by, for people: times, or counted operations.
    pub unit: &'static str,
    /// What each rank of the pipeline was to hold.
    pub memory: Vec<MemoryNeed>,
    /// What speeds are a share of.
    pub peak: Option<Peak>,
    /// Every value of the configuration, as TOML.
    pub config: String,
    /// Steps of the whole run; unset on the page of a plan that does not run.
    pub total_steps: Option<usize>,
}

/// What the ranks of the first pipeline ran and held.
#[derive(Debug, Clone, PartialEq)]
pub struct Ran {
    /// The actions of their last steps, step after step.
    pub timeline: Timeline,
    /// The bytes that each of them held.
    pub memory: Vec<MemoryNeed>,
}

impl Page {
    /// The page, with the records of `metrics.jsonl`. It stands alone, and is dark where its reader
    /// prefers that.
    ///
    /// # Errors
    /// When the plan cannot be reported.
    pub fn to_html(&self, records: &[Value], ran: Option<&Ran>) -> Result<String> {
        let mut html = String::new();
        let title = escape(&self.title);
        let _ = write!(
            html,
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
             <title>{title}</title>\n<style>\n{}</style></head><body>\n<h1>{title}</h1>\n",
            include_str!("page/style.css"),
        );
        let degrees = self.plan.draft.degrees;
        let recorded = self.total_steps.map(|total| {
            let step = last(records, "step").unwrap_or(0.0);
            format!(", {step} of {total} steps recorded")
        });
        let _ = writeln!(
            html,
            "<p>dp {} × tp {} × pp {}{}, schedule {}{}. Written by merak {}.</p>",
            degrees.dp,
            degrees.tp,
            degrees.pp,
            if degrees.sp > 1 {
                format!(" × sp {}", degrees.sp)
            } else {
                String::new()
            },
            escape(&self.plan.schedule.name),
            recorded.unwrap_or_default(),
            env!("CARGO_PKG_VERSION"),
        );
        if self.total_steps.is_some() {
            html += &tiles(records);
            html += &charts(records);
        }
        if let Some(peak) = self.peak {
            let text = escape(&peak.to_string());
            let _ = writeln!(
                html,
                "<p>MFU is the share of {text}. A token counts 6 N + 12 layers hidden seq operations, N without embeddings; \
                 recomputation counts nothing.</p>"
            );
        }
        html += &self.pipeline(ran);
        html += &self.stages()?;
        html += &self.memory(ran);
        let _ = write!(
            html,
            "<h2>Configuration</h2>\n<details open><summary>config.resolved.toml</summary><pre>{}</pre></details>\n</body></html>\n",
            escape(&self.config)
        );
        Ok(html)
    }

    /// The planned timeline, with the real one beside it where it is known.
    fn pipeline(&self, ran: Option<&Ran>) -> String {
        let real = ran.map(|ran| median_step(&self.plan, &ran.timeline));
        let real = real.filter(|real| real.makespan() > 0.0);
        let Some((mut planned, is_timed)) = self.planned() else {
            return String::new();
        };
        let mut text = "<h2>Pipeline</h2>\n".to_owned();
        if !is_timed {
            // Operations have no seconds: the plan is drawn as long as the step.
            let end = real.as_ref().map_or(1.0, Timeline::makespan);
            stretch(&mut planned, end);
        }
        let _ = writeln!(
            text,
            "<p>{}{}</p>",
            match (is_timed, &real) {
                (true, _) | (_, None) => format!("Planned by {}.", self.unit),
                (false, Some(_)) =>
                    format!("Planned by {}, drawn as long as the real step.", self.unit),
            },
            match &real {
                None if self.total_steps.is_none() => String::new(),
                Some(real) => format!(
                    " Real is the median of the last steps: {:.1} ms of pipeline, of which ranks wait {:.0} %, and {:.0} % in the plan.",
                    1e3 * real.makespan(),
                    100.0 * real.bubble(),
                    100.0 * planned.bubble()
                ),
                None => " The real one follows at the end of the run.".to_owned(),
            }
        );
        let mut rows = vec![("planned", &planned)];
        rows.extend(real.as_ref().map(|real| ("real", real)));
        let _ = writeln!(text, "<figure class=\"wide\">{}</figure>", timelines(&rows));
        text
    }

    /// What the plan runs when, and whether its times are seconds.
    fn planned(&self) -> Option<(Timeline, bool)> {
        if let Some(prediction) = &self.prediction {
            return Some((prediction.simulation.timeline.clone(), true));
        }
        let report = self.plan.partition_report().ok()?;
        let stages = report.stages.iter();
        let flops = |of: fn(&merak_partition::StageReport) -> u64| {
            stages
                .clone()
                .map(|stage| of(stage) as f64)
                .collect::<Vec<_>>()
        };
        let half: Vec<_> = flops(|stage| stage.backward.flops / 2);
        let costs = Costs {
            forward: flops(|stage| stage.forward.flops),
            input_grad: half.clone(),
            weight_grad: half,
            recompute: flops(|stage| stage.recompute.flops),
            hop: vec![0.0; report.stages.len().saturating_sub(1)],
            overlap: 1.0,
        };
        let simulation = simulate(&self.plan.schedule, &costs).ok()?;
        Some((simulation.timeline, false))
    }

    /// Which layer is where, and why.
    fn stages(&self) -> Result<String> {
        let report = self.plan.partition_report()?;
        let mut text = "<h2>Plan</h2>\n".to_owned();
        let _ = writeln!(
            text,
            "<p>Segments by {}. Stages by {}. Ranks are those of the pipeline.</p>",
            escape(&report.split),
            escape(&report.layout)
        );
        text += "<div class=\"wide\"><table><tr><th>stage</th><th>rank</th><th class=\"text\">modules</th><th>parameters</th>\
                 <th>forward, GFLOP</th><th>backward, GFLOP</th><th>recompute, GFLOP</th><th>sent per microbatch</th><th>kept per microbatch</th>\
                 <th>live microbatches</th><th class=\"text\">inputs</th></tr>\n";
        for stage in &report.stages {
            let gflop = |flops: u64| format!("{:.3}", flops as f64 / 1e9);
            let _ = writeln!(
                text,
                "<tr><td>{}</td><td>{}</td><td class=\"text\">{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>\
                 <td>{}</td><td class=\"text\">{}</td></tr>",
                stage.stage,
                stage.rank,
                escape(&stage.modules.join(", ")),
                stage.parameters,
                gflop(stage.forward.flops),
                gflop(stage.backward.flops),
                gflop(stage.recompute.flops),
                Bytes::from(stage.sent.activation_bytes + stage.sent.gradient_bytes),
                Bytes::from(stage.kept_bytes),
                stage.live_microbatches,
                escape(&stage.inputs.join(", ")),
            );
        }
        text += "</table></div>\n";
        for tied in &report.tied {
            let stages: Vec<_> = tied.copies.iter().map(ToString::to_string).collect();
            let _ = writeln!(
                text,
                "<p>Tied {}: stage {} owns it{}.</p>",
                escape(&tied.name),
                tied.owner,
                if stages.is_empty() {
                    String::new()
                } else {
                    format!(", copies on {}", stages.join(", "))
                }
            );
        }
        Ok(text)
    }

    /// The memory of each rank, predicted and measured.
    fn memory(&self, ran: Option<&Ran>) -> String {
        let held = ran.map_or(&[][..], |ran| &ran.memory);
        let (columns, measured) = if held.is_empty() {
            (1, "")
        } else {
            (2, "<th>measured</th>")
        };
        let mut text = "<h2>Memory of each rank of the pipeline</h2>\n<div class=\"wide\"><table><tr><th></th>"
            .to_owned();
        for name in PARTS {
            let _ = write!(text, "<th colspan=\"{columns}\">{name}</th>");
        }
        text += "</tr>\n<tr><th>rank</th>";
        for _ in PARTS {
            let _ = write!(text, "<th>predicted</th>{measured}");
        }
        text += "</tr>\n";
        for (rank, need) in self.memory.iter().enumerate() {
            let _ = write!(text, "<tr><td>{rank}</td>");
            let held = held.get(rank).map(parts);
            for (part, predicted) in parts(need).into_iter().enumerate() {
                let _ = write!(text, "<td>{}</td>", Bytes::from(predicted));
                if let Some(held) = held {
                    let _ = write!(text, "<td>{}</td>", Bytes::from(held[part]));
                }
            }
            text += "</tr>\n";
        }
        text + "</table></div>\n"
    }
}

/// The names of [`parts`].
const PARTS: [&str; 5] = [
    "weights",
    "gradients",
    "optimizer state",
    "most activations",
    "all",
];

/// The parts of a rank's memory that are measured too, and their sum.
fn parts(need: &MemoryNeed) -> [usize; 5] {
    let parts = [
        need.weights,
        need.gradients,
        need.optimizer,
        need.activations,
    ];
    let [weights, gradients, optimizer, activations] = parts;
    [
        weights,
        gradients,
        optimizer,
        activations,
        parts.iter().sum(),
    ]
}

/// The step of median length, from 0 on.
fn median_step(plan: &Plan, timeline: &Timeline) -> Timeline {
    let actions = plan.schedule.actions.iter().map(Vec::len);
    let ranks = timeline.ranks.iter().zip(actions);
    let ranks: Vec<Vec<&[Span]>> = ranks
        .map(|(spans, actions)| spans.chunks_exact(actions.max(1)).collect())
        .collect();
    let steps = ranks.iter().map(Vec::len).min().unwrap_or(0);
    let step = |step: usize| {
        let spans = ranks.iter().map(|steps| steps[step].to_vec());
        let mut timeline = Timeline {
            ranks: spans.collect(),
        };
        let starts = timeline.ranks.iter().flatten().map(|span| span.start);
        let first = starts.fold(f64::INFINITY, f64::min);
        for span in timeline.ranks.iter_mut().flatten() {
            span.start -= first;
            span.end -= first;
        }
        timeline
    };
    let mut all: Vec<_> = (0..steps).map(step).collect();
    all.sort_by(|a, b| a.makespan().total_cmp(&b.makespan()));
    let middle = all.len() / 2;
    all.into_iter().nth(middle).unwrap_or_default()
}

/// Makes a timeline end at a time.
fn stretch(timeline: &mut Timeline, end: f64) {
    let factor = end / timeline.makespan().max(f64::MIN_POSITIVE);
    for span in timeline.ranks.iter_mut().flatten() {
        span.start *= factor;
        span.end *= factor;
    }
}

/// A field of the records over their steps, times a factor.
fn series(records: &[Value], name: &'static str, field: &str, factor: f64) -> Series {
    let point = |record: &Value| {
        let (step, value) = (record["step"].as_f64()?, record[field].as_f64()?);
        Some((step, factor * value))
    };
    Series {
        name,
        points: records.iter().filter_map(point).collect(),
    }
}

/// The last number of a field.
fn last(records: &[Value], field: &str) -> Option<f64> {
    records
        .iter()
        .rev()
        .find_map(|record| record[field].as_f64())
}

/// The curves.
fn charts(records: &[Value]) -> String {
    let of = |name, field, factor| series(records, name, field, factor);
    let mut losses = vec![of("training", "loss", 1.0)];
    let validation = of("validation", "eval_loss", 1.0);
    if !validation.points.is_empty() {
        losses.push(validation);
    }
    let waits = of("waiting for data", "data_wait_s", 1e3);
    let figures = [
        chart("Loss", "nats per token", &losses, false),
        chart("Speed", "tokens/s", &[of("", "tokens_per_s", 1.0)], true),
        chart("MFU", "% of the peak", &[of("", "mfu", 100.0)], true),
        chart(
            "Step",
            "ms",
            &[of("whole step", "step_time_s", 1e3), waits],
            true,
        ),
        chart(
            "Gradient norm",
            "before clipping",
            &[of("", "grad_norm", 1.0)],
            true,
        ),
        chart("Learning rate", "", &[of("", "lr", 1.0)], true),
        chart(
            "Memory of the first rank's process",
            "MiB",
            &[of("", "memory_bytes", 1.0 / f64::from(1 << 20))],
            true,
        ),
        chart("Loss scale", "", &[of("", "loss_scale", 1.0)], true),
    ];
    let figures: String = figures
        .into_iter()
        .filter(|figure| !figure.is_empty())
        .collect();
    format!("<h2>Curves</h2>\n<div class=\"charts\">{figures}</div>\n")
}

/// The last figures.
fn tiles(records: &[Value]) -> String {
    let last = |field| last(records, field);
    let loss = |field| last(field).map(|loss| format!("{loss:.4}"));
    let speed = last("tflops").map(|tflops| Flops(1e12 * tflops).to_string());
    let seconds = |field| last(field).map(|seconds| format!("{:.1} ms", 1e3 * seconds));
    let run = last("time_s").map(std::time::Duration::try_from_secs_f64);
    let run = run.and_then(std::result::Result::ok);
    let tiles = [
        ("training loss", loss("loss")),
        ("validation loss", loss("eval_loss")),
        (
            "tokens/s",
            last("tokens_per_s").map(|speed| format!("{speed:.0}")),
        ),
        ("by the model's operations", speed),
        ("MFU", last("mfu").map(|mfu| Percent(mfu).to_string())),
        ("a step", seconds("step_time_s")),
        ("of it waiting for data", seconds("data_wait_s")),
        ("tokens", last("tokens").map(|tokens| format!("{tokens}"))),
        ("training", run.map(|time| Readable(time).to_string())),
    ];
    let tiles = tiles.into_iter().filter_map(|(name, value)| {
        let value = value?;
        Some(format!(
            "<div class=\"tile\"><b>{value}</b><span>{name}</span></div>"
        ))
    });
    format!("<div class=\"tiles\">{}</div>\n", tiles.collect::<String>())
}

/// Text as it stands in a page. Names may come from a user's file.
fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}
