//! A router process that a run starts, pauses, kills and restarts.

use std::{
    fs::File,
    net::SocketAddr,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
};

use super::{cell::Broken, http};

/// A router process, which may be stopped.
pub(crate) struct RouterProcess {
    pub address: SocketAddr,
    child: Arc<Mutex<Option<Child>>>,
    settings: Vec<(String, String)>,
    /// The cell and its broken build.
    broken: Option<(&'static str, Broken)>,
}

impl RouterProcess {
    pub(crate) fn new(
        port: u16,
        settings: Vec<(String, String)>,
        broken: Option<(&'static str, Broken)>,
    ) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        Self { address, child: Arc::default(), settings, broken }
    }

    pub(crate) fn is_baseline(&self) -> bool {
        self.broken.is_some_and(|(_, broken)| broken.is_baseline())
    }

    pub(crate) fn start(&self) {
        self.start_with(&[]);
    }

    /// Starts the process with additional environment variables.
    pub(crate) fn start_with(&self, more: &[(&str, String)]) {
        // A process that survived its kill would disturb later runs.
        self.killer()();
        let mut command = match self.broken {
            Some((cell, broken)) if broken.needs_other_program() => {
                let mut command = Command::new(std::env::current_exe().unwrap());
                command.args(["--as-broken-router", cell]);
                command
            }
            _ => Command::new(testkit::program_path()),
        };
        command.env_clear().envs(self.settings.iter().map(|(name, value)| (name, value)));
        command.envs(more.iter().map(|(name, value)| (*name, value)));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        if let Some(directory) = std::env::var_os("CHAOS_LOGS") {
            let path = PathBuf::from(directory).join(format!("router-{}.log", self.address.port()));
            let file = File::options().create(true).append(true).open(path);
            command.env("LOG_LEVEL", "info").stderr(file.expect("CHAOS_LOGS is a directory"));
        }
        *self.child.lock().unwrap() = Some(command.spawn().expect("a router starts"));
    }

    pub(crate) fn is_ready(&self) -> bool {
        let path = if self.is_baseline() { "/api/v1/tiers" } else { "/ready" };
        http::get(self.address, path).is_ok_and(|response| response.status == 200)
    }

    pub(crate) fn is_alive(&self) -> bool {
        let mut child = self.child.lock().unwrap();
        child.as_mut().is_some_and(|child| child.try_wait().is_ok_and(|status| status.is_none()))
    }

    pub(crate) fn signal(&self, name: &str) {
        if let Some(child) = self.child.lock().unwrap().as_ref() {
            signal(child, name);
        }
    }

    /// A function that kills this router.
    pub(crate) fn killer(&self) -> impl Fn() + Send + Sync + 'static {
        let child = self.child.clone();
        move || {
            if let Some(child) = child.lock().unwrap().as_mut() {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

fn signal(child: &Child, name: &str) {
    let _ = Command::new("kill").arg(format!("-{name}")).arg(child.id().to_string()).status();
}

impl Drop for RouterProcess {
    fn drop(&mut self) {
        self.killer()();
    }
}
