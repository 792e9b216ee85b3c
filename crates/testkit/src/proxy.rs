//! A TCP proxy that injects faults: latency, lost or corrupted replies, stalls, cuts, resets, a
//! limit on commands per second, and a kill at a chosen moment of an allocation.

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::dice::Dice;

/// How often a stalled connection looks whether the stall is over.
const LOOK: Duration = Duration::from_millis(5);

/// The faults of all connections through a proxy.
#[derive(Default, Clone)]
pub struct Faults {
    /// One-way latency: least, most.
    pub delay: Option<(Duration, Duration)>,
    pub lose_answers: bool,
    /// One of twenty replies has a wrong byte.
    pub corrupt_answers: bool,
    stall: Option<Stall>,
    cut: Option<Cut>,
    /// Commands per second that the server executes at most.
    pub cap: Option<u32>,
}

/// Bytes do not arrive, and neither side is told; they arrive when the stall ends.
#[derive(Clone, Copy)]
struct Stall {
    /// Connections with a smaller number stall.
    before: u64,
    answers: bool,
}

/// Connections end, and new ones are refused.
#[derive(Clone, Copy)]
enum Cut {
    All,
    From(IpAddr),
}

impl Cut {
    fn is_of(self, peer: IpAddr) -> bool {
        match self {
            Self::All => true,
            Self::From(address) => address == peer,
        }
    }
}

/// The moment of an allocation at which a router is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    BeforeSending,
    AfterSending,
    AfterReply,
}

type Kill = Box<dyn Fn() + Send + Sync>;

/// A connection of a client. Its end ends the one to the server, after what was sent has been
/// passed on.
struct Near {
    number: u64,
    peer: IpAddr,
    stream: TcpStream,
}

#[derive(Default)]
struct Shared {
    faults: Mutex<Faults>,
    connections: Mutex<Vec<Near>>,
    next_number: AtomicU64,
    trap: Mutex<Option<(Moment, Kill)>>,
    /// Bytes of requests that are replaced by others of the same length.
    replaced: Mutex<Option<(&'static [u8], &'static [u8])>>,
    /// Requests that a stall keeps from arriving.
    held: Mutex<Vec<u8>>,
    /// The next reply is the last before the trap kills.
    last_reply: AtomicBool,
    spent: Mutex<(Option<Instant>, u32)>,
    dice: Mutex<Dice>,
}

pub struct Proxy {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

impl Proxy {
    pub fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared::default());
        let all = shared.clone();
        // (ends with the process; a proxy without connections costs nothing)
        thread::spawn(move || listener.incoming().flatten().for_each(|near| all.join(near, port)));
        Self { address, shared }
    }

    pub fn port(&self) -> u16 {
        self.address.port()
    }

    pub fn set(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.shared.faults());
    }

    /// Delays everything by `one_way` in each direction.
    pub fn set_latency(&self, one_way: Duration) {
        self.set(|faults| faults.delay = Some((one_way, one_way)));
    }

    pub fn lose_answers(&self, lose: bool) {
        self.set(|faults| faults.lose_answers = lose);
    }

    pub fn corrupt_answers(&self, corrupt: bool) {
        self.set(|faults| faults.corrupt_answers = corrupt);
    }

    /// Requests on the connections there are wait on their way, or arrive.
    pub fn hold_requests(&self, hold: bool) {
        let before = self.shared.next_number.load(Ordering::SeqCst);
        self.set(|faults| faults.stall = hold.then_some(Stall { before, answers: false }));
    }

    /// All connections stall, also later ones.
    pub fn stall(&self) {
        self.set(|faults| faults.stall = Some(Stall { before: u64::MAX, answers: true }));
    }

    /// The connections there are stall.
    pub fn stall_connections(&self) {
        let before = self.shared.next_number.load(Ordering::SeqCst);
        self.set(|faults| faults.stall = Some(Stall { before, answers: true }));
    }

    /// Ends all connections and refuses new ones, or accepts them again.
    pub fn cut(&self, cut: bool) {
        self.cut_off(cut.then_some(Cut::All));
    }

    /// Ends the connections of an address and refuses new ones.
    pub fn cut_from(&self, address: IpAddr) {
        self.cut_off(Some(Cut::From(address)));
    }

    fn cut_off(&self, cut: Option<Cut>) {
        self.set(|faults| faults.cut = cut);
        if let Some(cut) = cut {
            self.shared.end(|near| cut.is_of(near.peer));
        }
    }

    /// Ends all connections there are.
    pub fn reset(&self) {
        self.shared.end(|_| true);
    }

    /// Ends all faults; connections that were cut stay closed.
    pub fn heal(&self) {
        *self.shared.faults() = Faults::default();
        self.shared.held.lock().unwrap().clear();
        self.disarm();
    }

    pub fn is_slow(&self) -> bool {
        self.shared.faults().delay.is_some()
    }

    /// Whether a stall holds back a request that contains `text`.
    pub fn holds(&self, text: &str) -> bool {
        contains(&self.shared.held.lock().unwrap(), text.as_bytes())
    }

    /// Replaces bytes of requests by others of the same length, from now on.
    pub fn replace(&self, bytes: &'static [u8], by: &'static [u8]) {
        *self.shared.replaced.lock().unwrap() = Some((bytes, by));
    }

    /// Kills a router at a moment of its next allocate.
    pub fn trap(&self, moment: Moment, kill: impl Fn() + Send + Sync + 'static) {
        *self.shared.trap.lock().unwrap() = Some((moment, Box::new(kill)));
    }

    pub fn disarm(&self) {
        self.shared.last_reply.store(false, Ordering::SeqCst);
        *self.shared.trap.lock().unwrap() = None;
    }
}

impl Shared {
    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap()
    }

    /// Connects a client to the server.
    fn join(self: &Arc<Self>, near: TcpStream, port: u16) {
        let Ok(peer) = near.peer_addr().map(|peer| peer.ip()) else { return };
        let server = SocketAddr::from(([127, 0, 0, 1], port));
        let Ok(far) = TcpStream::connect_timeout(&server, Duration::from_secs(1)) else { return };
        let number = self.next_number.fetch_add(1, Ordering::SeqCst);
        {
            // (a cut ends a connection that is listed, or is seen here)
            let mut connections = self.connections.lock().unwrap();
            if self.faults().cut.is_some_and(|cut| cut.is_of(peer)) {
                return;
            }
            connections.push(Near { number, peer, stream: near.try_clone().unwrap() });
        }
        for (from, to, is_request) in [(&near, &far, true), (&far, &near, false)] {
            let _ = from.set_nodelay(true);
            let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            let way = Way { shared: self.clone(), is_request, number };
            thread::spawn(move || way.carry(from, to));
        }
    }

    fn end(&self, is_meant: impl Fn(&Near) -> bool) {
        let connections = self.connections.lock().unwrap();
        for near in connections.iter().filter(|near| is_meant(near)) {
            let _ = near.stream.shutdown(Shutdown::Both);
        }
    }

    /// Waits as a server would that executes only `cap` commands per second.
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

    fn roll(&self, sides: usize) -> usize {
        self.dice.lock().unwrap().roll(sides)
    }
}

/// One direction of a connection.
struct Way {
    shared: Arc<Shared>,
    is_request: bool,
    number: u64,
}

impl Way {
    fn carry(self, mut from: TcpStream, mut to: TcpStream) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            let mut bytes = buffer[..count].to_vec();
            self.stall(&mut from, &mut bytes);
            if !self.pass(&mut bytes, &mut to) {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
        // Held requests outlive the client's connection; the server's ends after them.
        if self.is_request {
            let _ = from.shutdown(Shutdown::Both);
            self.shared.connections.lock().unwrap().retain(|near| near.number != self.number);
        }
    }

    fn is_stalled(&self) -> bool {
        let stall = self.shared.faults().stall;
        let is_meant = |stall: Stall| self.number < stall.before;
        stall.is_some_and(|stall| is_meant(stall) && (self.is_request || stall.answers))
    }

    /// Keeps what is sent until the stall ends.
    fn stall(&self, from: &mut TcpStream, bytes: &mut Vec<u8>) {
        if !self.is_stalled() {
            return;
        }
        let _ = from.set_read_timeout(Some(LOOK));
        let mut buffer = vec![0; 64 << 10];
        let mut seen = 0;
        while self.is_stalled() {
            if self.is_request {
                self.shared.held.lock().unwrap().extend(&bytes[seen..]);
                seen = bytes.len();
            }
            match from.read(&mut buffer) {
                Ok(count @ 1..) => bytes.extend(&buffer[..count]),
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                // (a client that has hung up leaves what it sent)
                Ok(0) | Err(_) => thread::sleep(LOOK),
            }
        }
        let _ = from.set_read_timeout(None);
    }

    /// Passes bytes on; false ends the connection.
    fn pass(&self, bytes: &mut [u8], to: &mut TcpStream) -> bool {
        let faults = self.shared.faults().clone();
        if let Some((least, most)) = faults.delay {
            let spread = (most - least).as_micros() as usize;
            let extra = Duration::from_micros(self.shared.roll(spread + 1) as u64);
            thread::sleep(least + extra);
        }
        if self.is_request {
            self.pass_request(bytes, &faults, to)
        } else {
            self.pass_answer(bytes, &faults, to)
        }
    }

    fn pass_request(&self, bytes: &mut [u8], faults: &Faults, to: &mut TcpStream) -> bool {
        if let Some((what, by)) = *self.shared.replaced.lock().unwrap() {
            replace(bytes, what, by);
        }
        if let Some(cap) = faults.cap {
            return self.pass_one_by_one(bytes, cap, to);
        }
        // (the older procedure is killed between two of its commands)
        let is_allocate = contains(bytes, b"_allocate_") || contains(bytes, b"pod_name");
        let mut trap = self.shared.trap.lock().unwrap();
        if let Some((moment, kill)) = trap.take_if(|_| is_allocate) {
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
        drop(trap);
        to.write_all(bytes).is_ok()
    }

    fn pass_answer(&self, bytes: &mut [u8], faults: &Faults, to: &mut TcpStream) -> bool {
        if faults.lose_answers {
            return true;
        }
        if faults.corrupt_answers && self.shared.roll(20) == 0 {
            bytes[self.shared.roll(bytes.len())] = b"0-:$*\r\n \xffx9_#"[self.shared.roll(13)];
        }
        let is_sent = to.write_all(bytes).is_ok();
        if self.shared.last_reply.swap(false, Ordering::SeqCst)
            && let Some((_, kill)) = self.shared.trap.lock().unwrap().take()
        {
            kill();
        }
        is_sent
    }

    /// Passes commands on at the rate of a slow server; false ends the connection.
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
}

fn contains(bytes: &[u8], text: &[u8]) -> bool {
    bytes.windows(text.len()).any(|window| window == text)
}

fn replace(bytes: &mut [u8], what: &[u8], by: &[u8]) {
    for at in 0..bytes.len().saturating_sub(what.len() - 1) {
        if &bytes[at..at + what.len()] == what {
            bytes[at..at + what.len()].copy_from_slice(by);
        }
    }
}
