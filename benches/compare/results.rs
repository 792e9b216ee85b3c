//! What came of it: the table, the ratios, and what is written down.

use std::{fs, path::Path};

use super::{
    BARE, MUX, Measured, POOL, ROUTER, System,
    plot::{Chart, Series},
};

fn head() -> String {
    format!(
        "| {:<22} | {:<29} | {:>9} | {:>20} | {:>20} | {:>13} | {:>6} |",
        "case",
        "system",
        "requests/s",
        "allocate p50/99/99.9",
        "release p50/99/99.9",
        "CPU µs r + R",
        "MB"
    ) + "\n| --- | --- | --- | --- | --- | --- | --- |"
}

pub(crate) fn print_head() {
    println!("{}", head());
}

fn row(it: &Measured) -> String {
    let refused: u64 = it.report.errors.values().sum();
    let name = match refused {
        0 => it.case.name.to_owned(),
        _ => format!("{}, {refused} refused", it.case.name),
    };
    let latency = |of: &smart_router::tools::load::Latency| {
        format!("{:.2} / {:.2} / {:.2}", of.p50, of.p99, of.p999)
    };
    format!(
        "| {:<22} | {:<29} | {:>9.0} | {:>20} | {:>20} | {:>5.1} + {:>5.1} | {:>6.0} |",
        name,
        it.system.name(),
        it.report.requests_per_second,
        latency(&it.report.allocate),
        latency(&it.report.release),
        it.router_cpu,
        it.redis_cpu,
        it.memory,
    )
}

pub(crate) fn print_row(it: &Measured) {
    println!("{}", row(it));
}

fn find<'a>(all: &'a [Measured], case: &str, system: System) -> &'a Measured {
    all.iter().find(|it| it.case.name == case && it.system == system).expect("measured")
}

/// What Redis spends on a call, against the bare scripts.
pub(crate) fn redis_cost(all: &[Measured]) -> String {
    let pair = |system| 2.0 * find(all, "exclusive", system).redis_cpu;
    format!(
        "Redis's CPU per allocate and release: {:.1} µs, bare scripts {:.1} µs: {:.2}x",
        pair(ROUTER),
        pair(BARE),
        pair(ROUTER) / pair(BARE)
    )
}

/// The last line: requests/s against the pool for the first four; p50 of allocate and
/// release against one connection for the next two; requests/s against the bare handler.
pub(crate) fn ratios(all: &[Measured]) -> String {
    let rate = |case: &str, system| find(all, case, system).report.requests_per_second;
    let p50 = |case: &str, system| {
        let report = &find(all, case, system).report;
        report.allocate.p50 + report.release.p50
    };
    let mut parts: Vec<String> = ["exclusive", "fallthrough", "shared5k", "shared50k"]
        .map(|case| format!("{case} {:.1}x", rate(case, ROUTER) / rate(case, POOL)))
        .into();
    parts.extend(
        ["conn1", "rtt1ms"]
            .map(|case| format!("{case} {:.1}x", p50(case, MUX) / p50(case, ROUTER))),
    );
    parts.push(format!("ceiling {:.2}", rate("exclusive", ROUTER) / rate("exclusive", BARE)));
    format!("ratios: {}", parts.join(", "))
}

/// Where the results begin and end in the page.
const MARKS: (&str, &str) = ("<!-- results -->\n", "<!-- end of results -->");

/// Puts table and plots into the documentation.
pub(crate) fn write_down(machine: &str, all: &[Measured]) {
    let docs = Path::new(testkit::ROOT).join("docs");
    fs::create_dir_all(docs.join("performance")).unwrap();
    for (name, chart) in [("latency", latency(all)), ("cost", cost(all))] {
        fs::write(docs.join(format!("performance/{name}.svg")), chart.svg()).unwrap();
    }
    let rows: String = all.iter().map(|it| row(it) + "\n").collect();
    let results = format!(
        "`./bench.sh --write`: {machine}\n\n{}\n{rows}\n{}\n\n`{}`\n",
        head(),
        redis_cost(all),
        ratios(all)
    );
    let page = docs.join("performance.md");
    let text = fs::read_to_string(&page).unwrap();
    let (before, rest) = text.split_once(MARKS.0).expect("the page has a place for results");
    let (_, after) = rest.split_once(MARKS.1).expect("the place has an end");
    fs::write(page, format!("{before}{}\n{results}\n{}{after}", MARKS.0, MARKS.1)).unwrap();
}

fn latency(all: &[Measured]) -> Chart {
    let of = |system: System, name: &str, percentile: fn(&Measured) -> f64, is_dashed| {
        let open = all.iter().filter(|it| it.system == system);
        let points = open.filter_map(|it| Some((it.case.rate?, percentile(it)))).collect();
        Series { name: format!("{}, {name}", system.short_name()), points, is_dashed }
    };
    let series = [ROUTER, POOL, BARE].into_iter().flat_map(|system| {
        [
            of(system, "p50", |it| it.report.allocate.p50, false),
            of(system, "p99", |it| it.report.allocate.p99, true),
        ]
    });
    Chart {
        title: "Time to allocate, calls arriving whether or not the router keeps up",
        x: "calls per second",
        y: "milliseconds",
        series: series.collect(),
    }
}

fn cost(all: &[Measured]) -> Chart {
    let of = |system: System, name: &str, cpu: fn(&Measured) -> f64, is_dashed| {
        let cases = ["shared50", "shared500", "shared5k", "shared50k"];
        let points = cases.map(|case| find(all, case, system));
        let points = points.iter().map(|it| (it.case.shared as f64, cpu(it))).collect();
        Series { name: format!("{}, {name}", system.short_name()), points, is_dashed }
    };
    let series = [ROUTER, POOL].into_iter().flat_map(|system| {
        [
            of(system, "Redis", |it| it.redis_cpu, false),
            of(system, "process", |it| it.router_cpu, true),
        ]
    });
    Chart {
        title: "CPU per request with more and more pods in a shared tier",
        x: "pods",
        y: "microseconds",
        series: series.collect(),
    }
}
