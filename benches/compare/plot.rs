//! SVG line charts with logarithmic axes.

use std::fmt::Write;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
/// Left, top, right, bottom.
const MARGINS: [f64; 4] = [70.0, 40.0, 200.0, 55.0];
const COLOURS: [&str; 6] = ["#0b6e4f", "#c8553d", "#3d5a98", "#8a6d3b", "#6b4c9a", "#444444"];

pub(crate) struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
    pub is_dashed: bool,
}

pub(crate) struct Chart {
    pub title: &'static str,
    pub x: &'static str,
    pub y: &'static str,
    pub series: Vec<Series>,
}

/// A logarithmic scale that maps values to 0..1.
struct Scale {
    from: f64,
    to: f64,
}

impl Scale {
    fn new(values: impl Iterator<Item = f64> + Clone) -> Self {
        let min = values.clone().fold(f64::INFINITY, f64::min);
        let max = values.fold(0.0, f64::max);
        Self { from: 10f64.powf(min.log10().floor()), to: 10f64.powf(max.log10().ceil()) }
    }

    fn position(&self, value: f64) -> f64 {
        (value / self.from).log10() / (self.to / self.from).log10()
    }

    fn ticks(&self) -> Vec<f64> {
        let decades = (self.to / self.from).log10().round() as i32;
        (0..=decades).map(|decade| self.from * 10f64.powi(decade)).collect()
    }
}

impl Chart {
    pub(crate) fn svg(&self) -> String {
        let [left, top, right, bottom] = MARGINS;
        let points = || self.series.iter().flat_map(|series| &series.points);
        let x = Scale::new(points().map(|point| point.0));
        let y = Scale::new(points().map(|point| point.1));
        let across = |value: f64| left + x.position(value) * (WIDTH - left - right);
        let up = |value: f64| HEIGHT - bottom - y.position(value) * (HEIGHT - top - bottom);
        let mut svg = format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="white"/>
<text x="{left}" y="22" font-size="15">{}</text>
"#,
            self.title
        );
        let mut line = |text: String| {
            svg.push_str(&text);
            svg.push('\n');
        };
        for tick in x.ticks() {
            let (at, low) = (across(tick), HEIGHT - bottom);
            line(format!(r##"<path d="M{at:.1} {top}V{low}" stroke="#ddd"/>"##));
            line(format!(
                r#"<text x="{at:.1}" y="{}" text-anchor="middle">{}</text>"#,
                low + 18.0,
                short(tick)
            ));
        }
        for tick in y.ticks() {
            let at = up(tick);
            line(format!(r##"<path d="M{left} {at:.1}H{}" stroke="#ddd"/>"##, WIDTH - right));
            line(format!(
                r#"<text x="{}" y="{:.1}" text-anchor="end">{}</text>"#,
                left - 8.0,
                at + 4.0,
                short(tick)
            ));
        }
        let middle = left + (WIDTH - left - right) / 2.0;
        line(format!(
            r#"<text x="{middle}" y="{}" text-anchor="middle">{}</text>"#,
            HEIGHT - 14.0,
            self.x
        ));
        let centre = top + (HEIGHT - top - bottom) / 2.0;
        line(format!(
            r#"<text x="18" y="{centre}" text-anchor="middle" transform="rotate(-90 18 {centre})">{}</text>"#,
            self.y
        ));
        for (number, series) in self.series.iter().enumerate() {
            let colour = COLOURS[number / 2 % COLOURS.len()];
            let dash = if series.is_dashed { r#" stroke-dasharray="5 4""# } else { "" };
            let mut path = String::new();
            for (step, point) in series.points.iter().enumerate() {
                let verb = if step == 0 { 'M' } else { 'L' };
                let _ = write!(path, "{verb}{:.1} {:.1}", across(point.0), up(point.1));
            }
            line(format!(
                r#"<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>"#
            ));
            for point in &series.points {
                let (at, height) = (across(point.0), up(point.1));
                line(format!(r#"<circle cx="{at:.1}" cy="{height:.1}" r="3" fill="{colour}"/>"#));
            }
            let (at, height) = (WIDTH - right + 14.0, top + 10.0 + 20.0 * number as f64);
            line(format!(
                r#"<path d="M{at} {height}h22" stroke="{colour}" stroke-width="2"{dash}/>"#
            ));
            line(format!(r#"<text x="{}" y="{}">{}</text>"#, at + 28.0, height + 4.0, series.name));
        }
        svg + "</svg>\n"
    }
}

/// Formats a tick: 0.1, 10, 1k.
fn short(value: f64) -> String {
    if value >= 1_000.0 { format!("{}k", value / 1_000.0) } else { format!("{value}") }
}
