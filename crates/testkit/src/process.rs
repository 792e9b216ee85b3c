//! Child processes and their use of the machine.

use std::{
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use super::eventually;

/// A process that ends when it is dropped.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    pub fn start(command: &mut Command) -> Self {
        Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts"))
    }

    /// Time on a processor so far.
    pub fn cpu(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        Duration::from_millis(ticks * 10)
    }

    /// Lets it stand still, or go on. (Whoever runs beside another keeps the processor
    /// awake for it.)
    pub fn set_running(&self, is_running: bool) {
        let signal = if is_running { "-CONT" } else { "-STOP" };
        let told = Command::new("kill").args([signal, &self.0.id().to_string()]).status();
        assert!(told.is_ok_and(|status| status.success()), "kill {signal}");
    }

    /// Waits until what its clients do at their start is done.
    pub fn wait_until_idle(&self) {
        eventually(Duration::from_secs(3), "the process is idle", || {
            let before = self.cpu();
            thread::sleep(Duration::from_millis(250));
            self.cpu() - before <= Duration::from_millis(10)
        });
    }

    /// Resident memory in megabytes.
    pub fn memory(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() / 1024.0
    }
}
