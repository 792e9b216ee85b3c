//! A TCP proxy that injects faults: latency, lost or corrupted replies, stalls, cuts, resets, a
//! limit on commands per second, and a kill at a chosen point of an allocation.

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

/// Interval at which a stalled connection checks whether the stall has ended.
const STALL_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The faults of all connections through a proxy.
#[derive(Default, Clone)]
pub struct Faults {
    /// One-way latency: least, most.
    pub latency: Option<(Duration, Duration)>,
    pub drop_replies: bool,
    /// One reply of twenty has a corrupted byte.
    pub corrupt_replies: bool,
    stall: Option<Stall>,
    refused: Option<Refused>,
    pub max_commands_per_second: Option<u32>,
}

/// Bytes are delayed without an error on either side until the stall ends.
#[derive(Clone, Copy)]
struct Stall {
    /// Connections with a smaller number are stalled.
    before: u64,
    includes_replies: bool,
}

/// The clients whose connections are closed and refused.
#[derive(Clone, Copy)]
enum Refused {
    All,
    From(IpAddr),
}

impl Refused {
    fn includes(self, peer: IpAddr) -> bool {
        match self {
            Self::All => true,
            Self::From(address) => address == peer,
        }
    }
}

/// The point of an allocation at which a router is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KillPoint {
    BeforeSend,
    AfterSend,
    AfterReply,
}

type Kill = Box<dyn Fn() + Send + Sync>;

/// A client's connection. When it closes, the connection to the server closes after all sent
/// bytes have been forwarded.
struct ClientConnection {
    number: u64,
    peer: IpAddr,
    stream: TcpStream,
}

#[derive(Default)]
struct Shared {
    faults: Mutex<Faults>,
    connections: Mutex<Vec<ClientConnection>>,
    next_number: AtomicU64,
    pending_kill: Mutex<Option<(KillPoint, Kill)>>,
    /// A byte sequence to replace in requests, and its replacement of the same length.
    replaced: Mutex<Option<(&'static [u8], &'static [u8])>>,
    /// Bytes of stalled requests.
    stalled: Mutex<Vec<u8>>,
    /// The pending kill runs after the next reply.
    last_reply: AtomicBool,
    spent: Mutex<(Option<Instant>, u32)>,
    dice: Mutex<Dice>,
}

pub struct FaultProxy {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

impl FaultProxy {
    pub fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared::default());
        let all = shared.clone();
        // The thread lives until the process ends.
        thread::spawn(move || listener.incoming().flatten().for_each(|near| all.join(near, port)));
        Self { address, shared }
    }

    pub fn port(&self) -> u16 {
        self.address.port()
    }

    pub fn set_faults(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.shared.faults());
    }

    /// Delays each direction by `one_way`.
    pub fn set_latency(&self, one_way: Duration) {
        self.set_faults(|faults| faults.latency = Some((one_way, one_way)));
    }

    pub fn drop_replies(&self, lose: bool) {
        self.set_faults(|faults| faults.drop_replies = lose);
    }

    pub fn corrupt_replies(&self, corrupt: bool) {
        self.set_faults(|faults| faults.corrupt_replies = corrupt);
    }

    /// Stalls requests on the open connections, or ends the stall.
    pub fn stall_requests(&self, hold: bool) {
        let before = self.shared.next_number.load(Ordering::SeqCst);
        self.set_faults(|faults| {
            faults.stall = hold.then_some(Stall { before, includes_replies: false })
        });
    }

    /// Stalls all connections, including new ones.
    pub fn stall_all(&self) {
        self.set_faults(|faults| {
            faults.stall = Some(Stall { before: u64::MAX, includes_replies: true })
        });
    }

    /// Stalls the open connections.
    pub fn stall_open_connections(&self) {
        let before = self.shared.next_number.load(Ordering::SeqCst);
        self.set_faults(|faults| faults.stall = Some(Stall { before, includes_replies: true }));
    }

    /// Closes all connections and refuses new ones, or accepts them again.
    pub fn refuse_connections(&self, refused: bool) {
        self.set_refused(refused.then_some(Refused::All));
    }

    /// Closes the connections of an address and refuses new ones.
    pub fn refuse_connections_from(&self, address: IpAddr) {
        self.set_refused(Some(Refused::From(address)));
    }

    fn set_refused(&self, refused: Option<Refused>) {
        self.set_faults(|faults| faults.refused = refused);
        if let Some(refused) = refused {
            self.shared.end(|near| refused.includes(near.peer));
        }
    }

    /// Closes all open connections.
    pub fn reset_connections(&self) {
        self.shared.end(|_| true);
    }

    /// Removes all faults; closed connections stay closed.
    pub fn heal(&self) {
        *self.shared.faults() = Faults::default();
        self.shared.stalled.lock().unwrap().clear();
        self.cancel_kill();
    }

    pub fn has_latency(&self) -> bool {
        self.shared.faults().latency.is_some()
    }

    /// Whether a stalled request contains `text`.
    pub fn has_stalled(&self, text: &str) -> bool {
        contains(&self.shared.stalled.lock().unwrap(), text.as_bytes())
    }

    /// Replaces a byte sequence in requests by another of the same length.
    pub fn replace_in_requests(&self, bytes: &'static [u8], by: &'static [u8]) {
        *self.shared.replaced.lock().unwrap() = Some((bytes, by));
    }

    /// Kills a router at a point of its next allocation or grant.
    pub fn kill_on_allocate(&self, point: KillPoint, kill: impl Fn() + Send + Sync + 'static) {
        *self.shared.pending_kill.lock().unwrap() = Some((point, Box::new(kill)));
    }

    pub fn cancel_kill(&self) {
        self.shared.last_reply.store(false, Ordering::SeqCst);
        *self.shared.pending_kill.lock().unwrap() = None;
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
            // `set_refused` closes a listed connection; one that is not listed yet is refused
            // here.
            let mut connections = self.connections.lock().unwrap();
            if self.faults().refused.is_some_and(|refused| refused.includes(peer)) {
                return;
            }
            connections.push(ClientConnection { number, peer, stream: near.try_clone().unwrap() });
        }
        for (from, to, is_request) in [(&near, &far, true), (&far, &near, false)] {
            let _ = from.set_nodelay(true);
            let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            let direction = Direction { shared: self.clone(), is_request, number };
            thread::spawn(move || direction.forward(from, to));
        }
    }

    fn end(&self, is_meant: impl Fn(&ClientConnection) -> bool) {
        let connections = self.connections.lock().unwrap();
        for near in connections.iter().filter(|near| is_meant(near)) {
            let _ = near.stream.shutdown(Shutdown::Both);
        }
    }

    /// Waits until a server that executes `cap` commands per second would run the next one.
    fn throttle(&self, cap: u32) {
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
struct Direction {
    shared: Arc<Shared>,
    is_request: bool,
    number: u64,
}

impl Direction {
    fn forward(self, mut from: TcpStream, mut to: TcpStream) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            let mut bytes = buffer[..count].to_vec();
            self.stall(&mut from, &mut bytes);
            if !self.pass(&mut bytes, &mut to) {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
        // Stalled requests outlive the client's connection; the server's closes after them.
        if self.is_request {
            let _ = from.shutdown(Shutdown::Both);
            self.shared.connections.lock().unwrap().retain(|near| near.number != self.number);
        }
    }

    fn is_stalled(&self) -> bool {
        let stall = self.shared.faults().stall;
        let is_meant = |stall: Stall| self.number < stall.before;
        stall.is_some_and(|stall| is_meant(stall) && (self.is_request || stall.includes_replies))
    }

    /// Collects bytes until the stall ends.
    fn stall(&self, from: &mut TcpStream, bytes: &mut Vec<u8>) {
        if !self.is_stalled() {
            return;
        }
        let _ = from.set_read_timeout(Some(STALL_POLL_INTERVAL));
        let mut buffer = vec![0; 64 << 10];
        let mut seen = 0;
        while self.is_stalled() {
            if self.is_request {
                self.shared.stalled.lock().unwrap().extend(&bytes[seen..]);
                seen = bytes.len();
            }
            match from.read(&mut buffer) {
                Ok(count @ 1..) => bytes.extend(&buffer[..count]),
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                // Bytes of a client that has disconnected are still delivered.
                Ok(0) | Err(_) => thread::sleep(STALL_POLL_INTERVAL),
            }
        }
        let _ = from.set_read_timeout(None);
    }

    /// Forwards bytes; false closes the connection.
    fn pass(&self, bytes: &mut [u8], to: &mut TcpStream) -> bool {
        let faults = self.shared.faults().clone();
        if let Some((least, most)) = faults.latency {
            let spread = (most - least).as_micros() as usize;
            let extra = Duration::from_micros(self.shared.roll(spread + 1) as u64);
            thread::sleep(least + extra);
        }
        if self.is_request {
            self.pass_request(bytes, &faults, to)
        } else {
            self.pass_reply(bytes, &faults, to)
        }
    }

    fn pass_request(&self, bytes: &mut [u8], faults: &Faults, to: &mut TcpStream) -> bool {
        if let Some((what, by)) = *self.shared.replaced.lock().unwrap() {
            replace(bytes, what, by);
        }
        if let Some(cap) = faults.max_commands_per_second {
            return self.pass_throttled(bytes, cap, to);
        }
        // `pod_name` matches the baseline, which is killed between two of its commands.
        let is_allocate = [b"_allocate_".as_slice(), b"_reserve_", b"pod_name"]
            .into_iter()
            .any(|text| contains(bytes, text));
        let mut pending_kill = self.shared.pending_kill.lock().unwrap();
        if let Some((point, kill)) = pending_kill.take_if(|_| is_allocate) {
            match point {
                KillPoint::BeforeSend => {
                    kill();
                    return false;
                }
                KillPoint::AfterSend => {
                    let _ = to.write_all(bytes);
                    kill();
                    return true;
                }
                KillPoint::AfterReply => {
                    *pending_kill = Some((KillPoint::AfterReply, kill));
                    self.shared.last_reply.store(true, Ordering::SeqCst);
                }
            }
        }
        drop(pending_kill);
        to.write_all(bytes).is_ok()
    }

    fn pass_reply(&self, bytes: &mut [u8], faults: &Faults, to: &mut TcpStream) -> bool {
        if faults.drop_replies {
            return true;
        }
        if faults.corrupt_replies && self.shared.roll(20) == 0 {
            bytes[self.shared.roll(bytes.len())] = b"0-:$*\r\n \xffx9_#"[self.shared.roll(13)];
        }
        let is_sent = to.write_all(bytes).is_ok();
        if self.shared.last_reply.swap(false, Ordering::SeqCst)
            && let Some((_, kill)) = self.shared.pending_kill.lock().unwrap().take()
        {
            kill();
        }
        is_sent
    }

    /// Forwards commands at the rate of a slow server; false closes the connection.
    fn pass_throttled(&self, bytes: &[u8], cap: u32, to: &mut TcpStream) -> bool {
        let next = |from: usize| {
            let rest = bytes.get(from + 1..)?;
            rest.windows(3).position(|three| three == b"\r\n*").map(|at| from + at + 3)
        };
        let mut from = 0;
        while from < bytes.len() {
            let end = next(from).unwrap_or(bytes.len());
            self.shared.throttle(cap);
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
