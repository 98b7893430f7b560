//! Charts of what `lab_load compare` wrote.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use serde_json::Value;

use crate::report::median_of;
use crate::svg::Chart;

/// What to draw.
#[derive(Args, Clone, Debug)]
pub struct PlotArgs {
    /// Files that `lab_load compare --json` wrote; several are taken together for what depends on the machine's size
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Folder to write charts to
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
}

/// `lab_load plot`.
pub fn main(args: &PlotArgs) -> Result<()> {
    let read = |path: &PathBuf| {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let value: Value = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        Ok(value["contenders"].as_array().cloned().unwrap_or_default())
    };
    let contenders = args.files.iter().map(read).collect::<Result<Vec<_>>>()?.concat();
    for (name, svg) in charts(&contenders) {
        let path: &Path = &args.out.join(name);
        fs::write(path, svg).with_context(|| path.display().to_string())?;
        println!("{}", path.display());
    }
    Ok(())
}

/// All charts for which there are figures: (file name, SVG).
fn charts(contenders: &[Value]) -> Vec<(&'static str, String)> {
    let feed = |title, unit, key: &'static str, factor: f64| {
        let feeds = |contender: &Value, scenario: &str| {
            let runs = list(contender, "runs").filter(|run| run["scenario"] == scenario).map(|run| &run["feed"]);
            Some(median_of(runs, |_| true, "gpu_busy")?[key].as_f64()? * factor)
        };
        bars(title, unit, contenders, &names(contenders, "runs", "scenario"), feeds)
    };
    let fair = |contender: &Value, what: &str| {
        let median = |contender: &Value| {
            let found = list(contender, "fair").find(|benchmark| benchmark["what"] == what)?;
            let median = found["median"].as_f64()?;
            Some(if found["unit"] == "steps/s" { 1.0 / median } else { median })
        };
        Some(median(contender)? / median(contenders.first()?)?)
    };
    let tree = |key: &'static str| {
        move |contender: &Value, tree: &str| {
            let found = median_of(list(contender, "weights"), |report| report["tree"] == tree, "worst_error")?;
            Some(found[key].as_f64()?.abs() * 100.0)
        }
    };
    let trees = names(contenders, "weights", "tree");
    let stall = |contender: &Value, storm: &str| {
        median_of(list(contender, "storms"), |report| report["storm"] == storm, "longest_stall_ms")?["longest_stall_ms"]
            .as_f64()
    };
    let charts = [
        ("busy.svg", feed("GPU busy beside neighbours", "% of time, more is better", "gpu_busy", 100.0)),
        ("starvation.svg", feed("Feeders runnable but not running", "% of time, less is better", "delay_share", 100.0)),
        (
            "fair.svg",
            bars(
                "Micro-benchmarks, time as a multiple of the first",
                "less is better",
                contenders,
                &names(contenders, "fair", "what"),
                fair,
            ),
        ),
        ("weights.svg", bars("Groups: mean error", "% of what was due", contenders, &trees, tree("mean_error"))),
        (
            "weights-worst.svg",
            bars("Groups: worst error", "% of what was due", contenders, &trees, tree("worst_error")),
        ),
        (
            "storms.svg",
            bars("Longest stall in a storm", "ms", contenders, &names(contenders, "storms", "storm"), stall),
        ),
        ("cost-tasks.svg", growth(contenders, "tasks")),
        ("cost-groups.svg", growth(contenders, "groups")),
        ("cost-cpus.svg", growth(contenders, "cpus")),
        ("cost-feeders.svg", growth(contenders, "feeders")),
    ];
    charts.into_iter().filter_map(|(name, svg)| Some((name, svg?))).collect()
}

fn list<'a>(contender: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    contender[key].as_array().into_iter().flatten()
}

/// The different values of `key` in the lists `list_key` of all contenders, in the order they come.
fn names(contenders: &[Value], list_key: &str, key: &str) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for name in
        contenders.iter().flat_map(|contender| list(contender, list_key)).filter_map(|entry| entry[key].as_str())
    {
        if !names.iter().any(|known| known == name) {
            names.push(name.to_string());
        }
    }
    names
}

/// Bars of all contenders that have any; none if nobody has.
fn bars(
    title: &str,
    unit: &str,
    contenders: &[Value],
    categories: &[String],
    value: impl Fn(&Value, &str) -> Option<f64>,
) -> Option<String> {
    let has_any = |contender: &&Value| categories.iter().any(|category| value(contender, category).is_some());
    let shown: Vec<&Value> = contenders.iter().filter(has_any).collect();
    let rows: Vec<(String, Vec<Option<f64>>)> = categories
        .iter()
        .map(|category| (category.clone(), shown.iter().map(|contender| value(contender, category)).collect()))
        .collect();
    let series = shown.iter().map(|contender| name_of(contender)).collect();
    (!shown.is_empty()).then(|| Chart { title, unit, series }.bars(&rows))
}

fn name_of(contender: &Value) -> String {
    contender["name"].as_str().unwrap_or_default().to_string()
}

/// How the cost of a crowd's context switch grows with `size`, all else the same; none if it was measured for one only.
fn growth(contenders: &[Value], size: &str) -> Option<String> {
    let (title, unit) = (format!("Cost of a context switch by number of {size}"), "instructions, less is better");
    let crowds = |contender| list(contender, "costs").filter(|cost| cost["load"] == "crowd");
    let others = |cost: &Value| {
        let others = ["tasks", "groups", "cpus", "feeders"].into_iter().filter(|&key| key != size);
        others.map(|key| cost[key].as_u64().unwrap_or(0)).collect::<Vec<_>>()
    };
    // All else the same: as it is where most sizes were measured.
    let mut sizes: BTreeMap<Vec<u64>, BTreeSet<u64>> = BTreeMap::new();
    for cost in contenders.iter().flat_map(crowds) {
        sizes.entry(others(cost)).or_default().extend(cost[size].as_u64());
    }
    let (same, _) = sizes.into_iter().max_by_key(|(_, sizes)| sizes.len())?;
    let mut lines: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    for contender in contenders {
        for (key, what) in [("ns_per_switch", "in all"), ("bpf_ns_per_switch", "BPF")] {
            let points = crowds(contender)
                .filter(|cost| others(cost) == same)
                .filter_map(|cost| Some((cost[size].as_f64()?.max(1.0), cost[key].as_f64()?)))
                .filter(|&(_, ns)| ns > 0.0);
            let name = format!("{}, {what}", name_of(contender));
            match lines.iter_mut().find(|(known, _)| *known == name) {
                Some((_, known)) => known.extend(points),
                None => lines.push((name, points.collect())),
            }
        }
    }
    for (_, points) in &mut lines {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    lines.retain(|(_, points)| points.first().map(|point| point.0) != points.last().map(|point| point.0));
    let (series, points): (Vec<String>, Vec<Vec<(f64, f64)>>) = lines.into_iter().unzip();
    (!points.is_empty()).then(|| Chart { title: &title, unit, series }.lines(size, &points))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_what_was_measured_is_drawn() {
        let contenders = [
            json!({"name": "a", "runs": [{"scenario": "hogs", "feed": {"gpu_busy": 0.5, "delay_share": 0.1}}]}),
            json!({"name": "b", "runs": []}),
        ];
        let charts = charts(&contenders);
        let names: Vec<&str> = charts.iter().map(|chart| chart.0).collect();
        assert_eq!(names, ["busy.svg", "starvation.svg"]);
        assert!(charts[0].1.contains("a, hogs: 50") && !charts[0].1.contains("b, hogs"));
    }

    #[test]
    fn growth_compares_sizes_with_all_else_the_same() {
        let cost = |tasks: u32, groups: u32, ns: f64| {
            json!({"load": "crowd", "tasks": tasks, "groups": groups, "cpus": 4, "feeders": 0,
                   "ns_per_switch": ns, "bpf_ns_per_switch": 0.0})
        };
        let contenders = [json!({"name": "a", "costs": [cost(10, 1, 5.0), cost(100, 1, 6.0), cost(100, 50, 90.0)]})];
        let svg = growth(&contenders, "tasks").unwrap();
        assert!(
            svg.contains("a, in all, 10: 5") && svg.contains("a, in all, 100: 6") && !svg.contains(": 90"),
            "{svg}"
        );
        assert!(growth(&contenders, "cpus").is_none());
    }
}
