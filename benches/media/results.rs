//! The results: a row per turn, the medians, and the ratios.

use super::{Mode, System, failover::Gaps};

/// Explains the columns.
const METHOD: &str = "\
- CPU: user and system time of the process that relays, per frame; a round trip is two frames.
- p99 of round trips: through the system, direct from clients to agents (plain, same load), and
  the difference, which is the part that the system adds.
- KiB/call: resident memory (smaps_rollup) with 2,000 idle streams less that with none, per
  stream, after 500 have been opened and closed. `reused`: the same with the first 500 of them;
  it shows how much of that memory the allocator had kept. Calls are allocated before.
- set-ups/s: handshake up to 101, then a close frame (1000) of the client, its answer, and the end
  of the connection by the system, 32 at a time; calls are allocated before. `µs each`: CPU time
  of the system per set-up.
- core: share of its core that the system used. Well below 100 % at the set-ups, the clients and
  agents were the limit.
- failover: 50 live calls in all seven formats through the gateway, an exclusive pod each. Agents
  are processes and are killed (SIGKILL) one after the other. gap: from the kill to the first frame
  of the next agent that reaches the provider. Exotel sends a frame every 100 ms, the others every
  20 ms; frames are lost until the next agent has the opening messages.
";

/// Smallest latency that a ratio is formed with, in milliseconds: below it is noise.
const MIN_LATENCY: f64 = 0.01;

/// The figures of one turn, or the medians of all.
#[derive(Clone, Copy)]
pub(crate) struct Figures {
    /// In microseconds.
    pub cpu_per_frame: f64,
    pub core_share: f64,
    /// Round trips in milliseconds, with and without the system.
    pub p99: f64,
    pub direct_p99: f64,
    pub added_p99: f64,
    /// Per stream.
    pub kib: f64,
    pub reused_kib: f64,
    /// New streams a second.
    pub set_ups: f64,
    pub set_up_core_share: f64,
    /// CPU time of one set-up in microseconds.
    pub set_up_cpu: f64,
}

/// One turn of one system.
pub(crate) struct Turn {
    pub system: System,
    pub mode: Mode,
    pub figures: Figures,
    /// Why the figures may say little.
    pub remarks: Vec<String>,
}

pub(crate) fn print_head() {
    println!("{METHOD}");
    println!(
        "| {:<6} | {:<5} | {:<7} | {:>12} | {:>4} | {:>6} | {:>6} | {:>6} | {:>8} | {:>6} | {:>9} | {:>5} | {:>7} |",
        "turn",
        "mode",
        "system",
        "CPU µs/frame",
        "core",
        "p99 ms",
        "direct",
        "added",
        "KiB/call",
        "reused",
        "set-ups/s",
        "core",
        "µs each"
    );
    println!("|{}", " --- |".repeat(13));
}

fn print_row(turn: &str, mode: Mode, system: System, it: &Figures) {
    println!(
        "| {turn:<6} | {:<5} | {:<7} | {:>12.1} | {:>2.0} % | {:>6.2} | {:>6.2} | {:>6.2} | {:>8.1} | {:>6.1} | {:>9.0} | {:>3.0} % | {:>7.0} |",
        mode.name(),
        system.name(),
        it.cpu_per_frame,
        it.core_share * 100.0,
        it.p99,
        it.direct_p99,
        it.added_p99,
        it.kib,
        it.reused_kib,
        it.set_ups,
        it.set_up_core_share * 100.0,
        it.set_up_cpu,
    );
}

pub(crate) fn print_turn(number: usize, turn: &Turn) {
    print_row(&number.to_string(), turn.mode, turn.system, &turn.figures);
}

fn median(turns: &[&Turn], figure: fn(&Figures) -> f64) -> f64 {
    let mut figures: Vec<f64> = turns.iter().map(|turn| figure(&turn.figures)).collect();
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn medians(turns: &[Turn], mode: Mode, system: System) -> Figures {
    let of: Vec<&Turn> =
        turns.iter().filter(|turn| (turn.mode, turn.system) == (mode, system)).collect();
    Figures {
        cpu_per_frame: median(&of, |it| it.cpu_per_frame),
        core_share: median(&of, |it| it.core_share),
        p99: median(&of, |it| it.p99),
        direct_p99: median(&of, |it| it.direct_p99),
        added_p99: median(&of, |it| it.added_p99),
        kib: median(&of, |it| it.kib),
        reused_kib: median(&of, |it| it.reused_kib),
        set_ups: median(&of, |it| it.set_ups),
        set_up_core_share: median(&of, |it| it.set_up_core_share),
        set_up_cpu: median(&of, |it| it.set_up_cpu),
    }
}

/// The medians, then the gateway's as multiples of nginx's, and the gaps of its failovers.
pub(crate) fn print_medians(turns: &[Turn], gaps: &Gaps) {
    let [plain, tls] = Mode::ALL.map(|mode| {
        System::ALL.map(|system| {
            let medians = medians(turns, mode, system);
            print_row("median", mode, system, &medians);
            medians
        })
    });
    println!();
    for Turn { system, mode, remarks, .. } in turns {
        for remark in remarks {
            println!("not reliable: {}, {}: {remark}", system.name(), mode.name());
        }
    }
    let ratio = |[nginx, gateway]: &[Figures; 2], figure: fn(&Figures) -> f64| {
        figure(gateway) / figure(nginx)
    };
    let added_p99 = |it: &Figures| it.added_p99.max(MIN_LATENCY);
    println!(
        "set-up: {:.2}x nginx, tls {:.2}x nginx; added p99 with tls {:.2}x nginx",
        ratio(&plain, |it| it.set_ups),
        ratio(&tls, |it| it.set_ups),
        ratio(&tls, added_p99),
    );
    println!("{gaps}");
    println!(
        "media: cpu {:.2}x nginx, tls {:.2}x nginx, p99 {:.2}x nginx, KiB/call {:.1}, tls KiB/call {:.1}",
        ratio(&plain, |it| it.cpu_per_frame),
        ratio(&tls, |it| it.cpu_per_frame),
        ratio(&plain, added_p99),
        plain[1].kib,
        tls[1].kib,
    );
}
