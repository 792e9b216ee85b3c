//! Child processes and their resource usage.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use super::eventually;

/// A process that is killed on drop.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    pub fn start(command: &mut Command) -> Self {
        let command = command.stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().expect("the process starts"))
    }

    /// CPU time so far.
    pub fn cpu_time(&self) -> Duration {
        cpu_time(self.0.id())
    }

    /// Continues or stops the process. Idle processes must be stopped during a measurement,
    /// because they keep the CPU from entering its sleep states.
    pub fn set_running(&self, is_running: bool) {
        let signal = if is_running { "-CONT" } else { "-STOP" };
        let sent = Command::new("kill").args([signal, &self.0.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()), "kill {signal}");
    }

    /// Waits until the startup work of the process and its clients is done.
    pub fn wait_until_idle(&self) {
        eventually(Duration::from_secs(3), "the process is idle", || {
            let before = self.cpu_time();
            thread::sleep(Duration::from_millis(250));
            self.cpu_time() - before <= Duration::from_millis(10)
        });
    }

    /// Resident memory in megabytes.
    pub fn memory_mb(&self) -> f64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() / 1024.0
    }
}

/// A command on one core. It gets `signal` when the thread that starts it ends, so that no
/// process survives a benchmark that is killed.
pub fn pinned(core: usize, signal: &str, program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", signal, "taskset", "--cpu-list", &core.to_string()]).arg(program);
    command
}

/// CPU time of a process so far, all threads together.
pub fn cpu_time(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

/// Resident memory of a process in KiB. `smaps_rollup` counts pages; the counters of `status`
/// are approximate.
pub fn resident_kib(pid: u32) -> u64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = rollup.lines().find(|line| line.starts_with("Rss:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// The children of a process.
pub fn children(pid: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    list.split_whitespace().map(|child| child.parse().unwrap()).collect()
}
