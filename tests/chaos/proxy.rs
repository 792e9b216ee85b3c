//! A network that goes wrong as told, between a router and what it talks to.

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How often a line that is idle looks whether something has changed.
const LOOK: Duration = Duration::from_millis(10);

/// What goes wrong on all lines through a proxy.
#[derive(Default, Clone)]
pub(crate) struct Faults {
    /// What is sent takes so long to arrive, each way: at least, at most.
    pub delay: Option<(Duration, Duration)>,
    /// Answers are lost.
    pub lose_answers: bool,
    /// Nothing arrives any more, but nobody is told; what was sent arrives later. On lines
    /// that began before so many others.
    pub stall: Option<u64>,
    /// Nobody from this address comes through.
    pub cut: Option<IpAddr>,
    /// Commands that Redis executes at most, per second.
    pub cap: Option<u32>,
}

/// When a router is killed that allocates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    BeforeSending,
    AfterSending,
    AfterReply,
}

type Kill = Box<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct Shared {
    faults: Mutex<Faults>,
    /// Lines that began under a smaller number are reset.
    resets: AtomicU64,
    lines: AtomicU64,
    trap: Mutex<Option<(Moment, Kill)>>,
    /// What is sent is changed on its way: these bytes for those.
    garble: Mutex<Option<(&'static [u8], &'static [u8])>>,
    /// What routers have sent that a stall keeps from arriving.
    held: Mutex<Vec<u8>>,
    /// The reply that is on its way is the last.
    last_reply: AtomicBool,
    spent: Mutex<(Option<Instant>, u32)>,
    dice: AtomicU64,
}

pub(crate) struct Proxy {
    pub port: u16,
    shared: Arc<Shared>,
}

impl Proxy {
    pub(crate) fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared::default());
        let all = shared.clone();
        // (ends with the process; one that nobody uses costs nothing)
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(peer) = client.peer_addr() else { continue };
                if all.faults().cut == Some(peer.ip()) {
                    continue;
                }
                let far = SocketAddr::from(([127, 0, 0, 1], port));
                let Ok(server) = TcpStream::connect_timeout(&far, Duration::from_secs(1)) else {
                    continue;
                };
                let number = all.resets.load(Ordering::SeqCst);
                let line = all.lines.fetch_add(1, Ordering::SeqCst);
                for (from, to, upwards) in [(&client, &server, true), (&server, &client, false)] {
                    let _ = from.set_nodelay(true);
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let shared = all.clone();
                    let way = Way { shared, upwards, number, line, peer: peer.ip() };
                    thread::spawn(move || way.carry(from, to));
                }
            }
        });
        Self { port: near, shared }
    }

    pub(crate) fn set(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.shared.faults());
    }

    /// Lets all lines stall, those to come included.
    pub(crate) fn stall(&self) {
        self.set(|faults| faults.stall = Some(u64::MAX));
    }

    /// Lets the lines there are stall.
    pub(crate) fn stall_lines(&self) {
        let lines = self.shared.lines.load(Ordering::SeqCst);
        self.set(|faults| faults.stall = Some(lines));
    }

    /// All is well again, for what comes; lines that were cut or stalled stay as they are.
    pub(crate) fn heal(&self) {
        *self.shared.faults() = Faults::default();
        self.shared.held.lock().unwrap().clear();
        self.disarm();
    }

    pub(crate) fn is_slow(&self) -> bool {
        self.shared.faults().delay.is_some()
    }

    /// Whether a stall keeps from arriving what has this in it.
    pub(crate) fn holds(&self, what: &str) -> bool {
        count(&self.shared.held.lock().unwrap(), what.as_bytes()) > 0
    }

    /// Changes some bytes for others of the same length, from now on.
    pub(crate) fn garble(&self, what: &'static [u8], by: &'static [u8]) {
        *self.shared.garble.lock().unwrap() = Some((what, by));
    }

    /// Ends all lines there are.
    pub(crate) fn reset(&self) {
        self.shared.resets.fetch_add(1, Ordering::SeqCst);
    }

    /// Kills nobody any more.
    pub(crate) fn disarm(&self) {
        self.shared.last_reply.store(false, Ordering::SeqCst);
        *self.shared.trap.lock().unwrap() = None;
    }

    /// Kills a router at a moment of its next allocate.
    pub(crate) fn trap(&self, moment: Moment, kill: impl Fn() + Send + Sync + 'static) {
        *self.shared.trap.lock().unwrap() = Some((moment, Box::new(kill)));
    }
}

impl Shared {
    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap()
    }

    /// Waits as long as Redis would if it could only do so much.
    fn wait_for_room(&self, cap: u32) {
        loop {
            let mut spent = self.spent.lock().unwrap();
            let begun = *spent.0.get_or_insert_with(Instant::now);
            let done = (begun.elapsed().as_secs_f64() * f64::from(cap)) as u32;
            if done > 0 {
                *spent = (Some(Instant::now()), spent.1.saturating_sub(done));
            }
            if spent.1 == 0 {
                spent.1 = 1;
                return;
            }
            drop(spent);
            thread::sleep(Duration::from_micros(100));
        }
    }

    fn roll(&self, sides: u64) -> u64 {
        let at = self.dice.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
        ((at ^ (at >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 33) % sides.max(1)
    }
}

/// One direction of a line.
struct Way {
    shared: Arc<Shared>,
    upwards: bool,
    number: u64,
    line: u64,
    peer: IpAddr,
}

impl Way {
    fn is_over(&self) -> bool {
        self.shared.resets.load(Ordering::SeqCst) != self.number
            || self.shared.faults().cut == Some(self.peer)
    }

    fn carry(self, mut from: TcpStream, mut to: TcpStream) {
        let _ = from.set_read_timeout(Some(LOOK));
        let mut some = vec![0; 64 << 10];
        loop {
            if self.is_over() {
                break;
            }
            match from.read(&mut some) {
                Ok(count @ 1..) => {
                    let mut sent = some[..count].to_vec();
                    self.stall(&mut from, &mut sent);
                    if !self.pass(&mut sent, &mut to) {
                        break;
                    }
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Ok(0) | Err(_) => break,
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Both);
        let _ = from.shutdown(std::net::Shutdown::Both);
    }

    /// Keeps what is sent while the line stalls.
    fn stall(&self, from: &mut TcpStream, sent: &mut Vec<u8>) {
        let is_stalled = || self.shared.faults().stall.is_some_and(|lines| self.line < lines);
        let mut more = vec![0; 64 << 10];
        let mut seen = 0;
        while is_stalled() {
            if self.upwards {
                self.shared.held.lock().unwrap().extend(&sent[seen..]);
                seen = sent.len();
            }
            match from.read(&mut more) {
                Ok(count @ 1..) => sent.extend(&more[..count]),
                // (who has hung up leaves what was sent)
                Ok(0) | Err(_) => thread::sleep(LOOK),
            }
        }
    }

    /// Passes commands on as Redis can take them. Whether the line goes on.
    fn pass_one_by_one(&self, bytes: &[u8], cap: u32, to: &mut TcpStream) -> bool {
        let next = |from: usize| {
            let rest = bytes.get(from + 1..)?;
            rest.windows(3).position(|three| three == b"\r\n*").map(|at| from + at + 3)
        };
        let mut from = 0;
        while from < bytes.len() {
            let end = next(from).unwrap_or(bytes.len());
            self.shared.wait_for_room(cap);
            if to.write_all(&bytes[from..end]).is_err() {
                return false;
            }
            from = end;
        }
        true
    }

    /// Whether the line goes on.
    fn pass(&self, bytes: &mut [u8], to: &mut TcpStream) -> bool {
        let faults = self.shared.faults().clone();
        if let Some((least, most)) = faults.delay {
            let spread = (most - least).as_millis() as u64;
            thread::sleep(least + Duration::from_millis(self.shared.roll(spread + 1)));
        }
        if self.upwards {
            if let Some((what, by)) = *self.shared.garble.lock().unwrap() {
                replace(bytes, what, by);
            }
            if let Some(cap) = faults.cap {
                return self.pass_one_by_one(bytes, cap, to);
            }
            // (the older procedure is killed between two of its commands)
            let is_allocate = count(bytes, b"_allocate_") > 0 || count(bytes, b"pod_name") > 0;
            let mut trap = self.shared.trap.lock().unwrap();
            match trap.as_ref().map(|(moment, _)| *moment) {
                Some(moment) if is_allocate => {
                    let (_, kill) = trap.take().unwrap();
                    match moment {
                        Moment::BeforeSending => {
                            kill();
                            return false;
                        }
                        Moment::AfterSending => {
                            let _ = to.write_all(bytes);
                            kill();
                            return true;
                        }
                        Moment::AfterReply => {
                            *trap = Some((Moment::AfterReply, kill));
                            self.shared.last_reply.store(true, Ordering::SeqCst);
                        }
                    }
                }
                _ => {}
            }
        } else if faults.lose_answers {
            return true;
        }
        let sent = to.write_all(bytes).is_ok();
        if !self.upwards
            && self.shared.last_reply.swap(false, Ordering::SeqCst)
            && let Some((_, kill)) = self.shared.trap.lock().unwrap().take()
        {
            kill();
        }
        sent
    }
}

fn count(bytes: &[u8], what: &[u8]) -> u32 {
    bytes.windows(what.len()).filter(|window| *window == what).count() as u32
}

fn replace(bytes: &mut [u8], what: &[u8], by: &[u8]) {
    for at in 0..bytes.len().saturating_sub(what.len() - 1) {
        if &bytes[at..at + what.len()] == what {
            bytes[at..at + what.len()].copy_from_slice(by);
        }
    }
}
