//! Charts as SVG: bars in groups, and lines over a logarithmic axis. No more than the benchmarks need.

use std::fmt::Write;

/// What both kinds of chart have.
pub struct Chart<'a> {
    /// Heading.
    pub title: &'a str,
    /// What the numbers are.
    pub unit: &'a str,
    /// What each series is called.
    pub series: Vec<String>,
}

/// Colours of series, distinct to most eyes and in grey (after Okabe and Ito).
const COLOURS: [&str; 8] = ["#999999", "#000000", "#56b4e9", "#d55e00", "#009e73", "#cc79a7", "#0072b2", "#e69f00"];

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 50.0;
/// Room for the names below the plot.
const NAMES: f64 = 30.0;
/// Height of a line of the legend.
const LINE: f64 = 18.0;
/// Series in one line of the legend.
const PER_LINE: usize = 3;

impl Chart<'_> {
    /// Bars: for each category its name and a number a series.
    pub fn bars(&self, categories: &[(String, Vec<Option<f64>>)]) -> String {
        let (low, high) = range(categories.iter().flat_map(|(_, values)| values).flatten().copied());
        let mut svg = self.open(low, high);
        let width = (WIDTH - LEFT - RIGHT) / categories.len().max(1) as f64;
        let bar = width * 0.8 / self.series.len().max(1) as f64;
        for (index, (name, values)) in categories.iter().enumerate() {
            let left = LEFT + width * index as f64;
            text(&mut svg, left + width / 2.0, HEIGHT - NAMES + LINE, "middle", name);
            for (series, value) in values.iter().enumerate() {
                let Some(value) = *value else { continue };
                let (a, b) = (y_of(value, low, high), y_of(0.0, low, high));
                let (x, y, height) = (left + width * 0.1 + bar * series as f64, a.min(b), (a - b).abs());
                let colour = COLOURS[series % COLOURS.len()];
                let title = escape(&format!("{}, {name}: {}", self.series[series], short(value)));
                element(
                    &mut svg,
                    &format!(
                        r#"<rect x="{x:.1}" y="{y:.1}" width="{:.1}" height="{height:.1}" fill="{colour}"><title>{title}</title></rect>"#,
                        bar * 0.92
                    ),
                );
            }
        }
        self.close(svg)
    }

    /// Lines: for each series points of (x, y), with x above zero.
    pub fn lines(&self, x_title: &str, points: &[Vec<(f64, f64)>]) -> String {
        let all = || points.iter().flatten();
        let (low, high) = range(all().map(|point| point.1));
        let mut xs: Vec<f64> = all().map(|point| point.0).collect();
        xs.sort_by(f64::total_cmp);
        xs.dedup();
        let (first, last) = (xs.first().copied().unwrap_or(1.0), xs.last().copied().unwrap_or(1.0));
        let x_of = |x: f64| {
            let part = if last > first { (x / first).ln() / (last / first).ln() } else { 0.5 };
            LEFT + 20.0 + part * (WIDTH - LEFT - RIGHT - 40.0)
        };
        let mut svg = self.open(low, high);
        for &x in &xs {
            text(&mut svg, x_of(x), HEIGHT - NAMES + LINE, "middle", &short(x));
        }
        text(&mut svg, WIDTH - RIGHT, HEIGHT - NAMES - 5.0, "end", x_title);
        for (series, points) in points.iter().enumerate() {
            let colour = COLOURS[series % COLOURS.len()];
            let at: Vec<String> =
                points.iter().map(|&(x, y)| format!("{:.1},{:.1}", x_of(x), y_of(y, low, high))).collect();
            element(
                &mut svg,
                &format!(r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2"/>"#, at.join(" ")),
            );
            for &(x, y) in points {
                let (cx, cy) = (x_of(x), y_of(y, low, high));
                let title = escape(&format!("{}, {}: {}", self.series[series], short(x), short(y)));
                element(
                    &mut svg,
                    &format!(
                        r#"<circle cx="{cx:.1}" cy="{cy:.1}" r="4" fill="{colour}"><title>{title}</title></circle>"#
                    ),
                );
            }
        }
        self.close(svg)
    }

    /// Head, title and axis.
    fn open(&self, low: f64, high: f64) -> String {
        let height = HEIGHT + LINE * self.series.len().div_ceil(PER_LINE) as f64 + 10.0;
        let mut svg = format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">"#
        );
        svg.push('\n');
        element(&mut svg, &format!(r#"<rect width="{WIDTH}" height="{height}" fill="white"/>"#));
        element(
            &mut svg,
            &format!(r#"<text x="{LEFT}" y="24" font-size="16" font-weight="bold">{}</text>"#, escape(self.title)),
        );
        text(&mut svg, LEFT, 42.0, "start", self.unit);
        let step = step_of(high - low);
        let mut mark = (low / step).ceil() * step;
        while mark <= high + step / 1000.0 {
            let y = y_of(mark, low, high);
            let colour = if mark.abs() < step / 2.0 { "#333" } else { "#ddd" };
            element(
                &mut svg,
                &format!(r#"<line x1="{LEFT}" y1="{y:.1}" x2="{}" y2="{y:.1}" stroke="{colour}"/>"#, WIDTH - RIGHT),
            );
            text(&mut svg, LEFT - 6.0, y + 4.0, "end", &short(mark));
            mark += step;
        }
        svg
    }

    /// Legend and end.
    fn close(&self, mut svg: String) -> String {
        let column = (WIDTH - LEFT - RIGHT) / PER_LINE as f64;
        for (index, name) in self.series.iter().enumerate() {
            let x = LEFT + column * (index % PER_LINE) as f64;
            let y = HEIGHT + 8.0 + LINE * (index / PER_LINE) as f64;
            let colour = COLOURS[index % COLOURS.len()];
            element(
                &mut svg,
                &format!(r#"<rect x="{x:.1}" y="{:.1}" width="12" height="12" fill="{colour}"/>"#, y - 10.0),
            );
            text(&mut svg, x + 18.0, y, "start", name);
        }
        svg.push_str("</svg>\n");
        svg
    }
}

fn element(svg: &mut String, element: &str) {
    svg.push_str(element);
    svg.push('\n');
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(svg, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{}</text>"#, escape(text));
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The axis that holds zero and all `values`.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values.fold((0.0_f64, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
    if low == high { (low, low + 1.0) } else { (low, high) }
}

fn y_of(value: f64, low: f64, high: f64) -> f64 {
    let bottom = HEIGHT - NAMES;
    bottom - (value - low) / (high - low) * (bottom - TOP)
}

/// 1, 2 or 5 times a power of ten, so that a `span` has four to ten marks.
fn step_of(span: f64) -> f64 {
    let power = 10_f64.powf((span / 5.0).log10().floor());
    [1.0, 2.0, 5.0].into_iter().map(|step| step * power).find(|step| span / step <= 10.0).unwrap_or(10.0 * power)
}

/// A number with no more digits than a chart needs.
fn short(value: f64) -> String {
    let text = if value.abs() >= 100.0 { format!("{value:.0}") } else { format!("{value:.2}") };
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    if text == "-0" { "0".to_string() } else { text.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart() -> Chart<'static> {
        Chart { title: "a < b", unit: "ns", series: vec!["one".to_string(), "two".to_string()] }
    }

    #[test]
    fn a_bar_is_as_high_as_its_number_and_absent_without_one() {
        let svg =
            chart().bars(&[("x".to_string(), vec![Some(1.0), Some(0.5)]), ("y".to_string(), vec![None, Some(0.0)])]);
        let full = HEIGHT - NAMES - TOP;
        assert!(svg.contains(&format!("height=\"{full:.1}\"")), "{svg}");
        assert!(svg.contains(&format!("height=\"{:.1}\"", full / 2.0)), "{svg}");
        assert_eq!(svg.matches("<title>").count(), 3);
        assert!(svg.contains("a &lt; b") && svg.trim_end().ends_with("</svg>"));
    }

    #[test]
    fn errors_below_zero_hang_from_the_axis() {
        let svg = chart().bars(&[("x".to_string(), vec![Some(1.0), Some(-1.0)])]);
        let zero = y_of(0.0, -1.0, 1.0);
        assert!(svg.contains(&format!("y=\"{zero:.1}\"")), "{svg}");
    }

    #[test]
    fn equal_factors_are_equally_far_apart_on_a_line_chart() {
        let svg = chart().lines("tasks", &[vec![(10.0, 1.0), (100.0, 1.0), (1000.0, 1.0)]]);
        let at: Vec<f64> = svg.split("cx=\"").skip(1).filter_map(|part| part.split('"').next()?.parse().ok()).collect();
        assert_eq!(at.len(), 3);
        assert!((at[2] - 2.0 * at[1] + at[0]).abs() < 0.2, "{at:?}");
    }

    #[test]
    fn axis_marks_are_round() {
        assert_eq!(step_of(1.0), 0.1);
        assert_eq!(step_of(73.0), 10.0);
        assert_eq!(short(-0.001), "0");
        assert_eq!(short(0.25), "0.25");
        assert_eq!(short(100.0), "100");
    }
}
