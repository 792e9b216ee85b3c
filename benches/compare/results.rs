//! The results: table, ratios, charts, and the results block of the documentation.

use std::{fs, path::Path};

use super::{
    BARE, MUX, Measurement, POOL, ROUTER, System,
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

fn row(it: &Measurement) -> String {
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

pub(crate) fn print_row(it: &Measurement) {
    println!("{}", row(it));
}

fn find<'a>(all: &'a [Measurement], case: &str, system: System) -> &'a Measurement {
    all.iter().find(|it| it.case.name == case && it.system == system).expect("measured")
}

/// Redis's CPU time per call, compared with the bare handler.
pub(crate) fn redis_cost(all: &[Measurement]) -> String {
    let pair = |system| 2.0 * find(all, "exclusive", system).redis_cpu;
    let (router, gateway, bare) = (pair(ROUTER), pair(System::Gateway), pair(BARE));
    format!(
        "Redis's CPU per allocate and release: {router:.1} µs, with media gateway {gateway:.1} µs, \
         bare scripts {bare:.1} µs: {:.2}x and {:.2}x",
        router / bare,
        gateway / bare
    )
}

/// The throughput and the p99 of an allocate during upkeep of 50,000 pods, and while a replica with
/// them starts, compared with the same router without upkeep.
pub(crate) fn upkeep(all: &[Measurement]) -> String {
    let report = |system| &find(all, "upkeep50k", system).report;
    let calm = report(System::Calm);
    let compared = |system| {
        let busy = report(system);
        format!(
            "{:.0} requests/s ({:.2}x), p99 {:.2} ms ({:.2}x)",
            busy.requests_per_second,
            busy.requests_per_second / calm.requests_per_second,
            busy.allocate.p99,
            busy.allocate.p99 / calm.allocate.p99
        )
    };
    format!(
        "50,000 pods: calm {:.0} requests/s, p99 {:.2} ms; during upkeep {}; while a replica starts {}",
        calm.requests_per_second,
        calm.allocate.p99,
        compared(System::Upkeep),
        compared(System::Start)
    )
}

/// The last line: requests/s compared with the pool for the first four cases, p50 of allocate
/// and release compared with one connection for the next two, requests/s compared with the bare
/// handler, and Redis's CPU compared with that of the bare scripts.
pub(crate) fn ratios(all: &[Measurement]) -> String {
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
    let redis_cpu = |system| find(all, "exclusive", system).redis_cpu;
    parts.push(format!("redis {:.2}x bare", redis_cpu(ROUTER) / redis_cpu(BARE)));
    format!("ratios: {}", parts.join(", "))
}

/// Markers of the results block in the page.
const RESULT_MARKERS: (&str, &str) = ("<!-- results -->\n", "<!-- end of results -->");

/// Writes table and charts to the documentation.
pub(crate) fn write_results(machine: &str, all: &[Measurement]) {
    let docs = Path::new(testkit::ROOT).join("docs");
    fs::create_dir_all(docs.join("performance")).unwrap();
    for (name, chart) in [("latency", latency(all)), ("cost", cost(all))] {
        fs::write(docs.join(format!("performance/{name}.svg")), chart.svg()).unwrap();
    }
    let rows: String = all.iter().map(|it| row(it) + "\n").collect();
    let results = format!(
        "`./bench.sh --write`: {machine}\n\n{}\n{rows}\n{}\n\n{}\n\n`{}`\n",
        head(),
        redis_cost(all),
        upkeep(all),
        ratios(all)
    );
    let page = docs.join("performance.md");
    let text = fs::read_to_string(&page).unwrap();
    let (before, rest) = text.split_once(RESULT_MARKERS.0).expect("the page has a results block");
    let (_, after) = rest.split_once(RESULT_MARKERS.1).expect("the results block ends");
    fs::write(
        page,
        format!("{before}{}\n{results}\n{}{after}", RESULT_MARKERS.0, RESULT_MARKERS.1),
    )
    .unwrap();
}

fn latency(all: &[Measurement]) -> Chart {
    let of = |system: System, name: &str, percentile: fn(&Measurement) -> f64, is_dashed| {
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
        title: "Allocate latency, open loop",
        x: "calls per second",
        y: "milliseconds",
        series: series.collect(),
    }
}

fn cost(all: &[Measurement]) -> Chart {
    let of = |system: System, name: &str, cpu: fn(&Measurement) -> f64, is_dashed| {
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
        title: "CPU per request by number of pods in a shared tier",
        x: "pods",
        y: "microseconds",
        series: series.collect(),
    }
}
