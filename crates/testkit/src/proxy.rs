//! A line to Redis that can lose answers, garble them, or break with requests still on it.

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use super::chance::Dice;

pub struct Proxy {
    pub address: SocketAddr,
    mute: Arc<AtomicBool>,
    garble: Arc<AtomicBool>,
    /// On so many lines, the oldest, what is sent waits.
    hold: Arc<AtomicUsize>,
    is_cut: Arc<AtomicBool>,
    /// One-way latency in microseconds.
    latency: Arc<AtomicU64>,
    /// The lines there have been, as the router sees them.
    near: Arc<Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    pub fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (mute, garble) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let (hold, is_cut) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
        let near = Arc::<Mutex<Vec<TcpStream>>>::default();
        let latency = Arc::<AtomicU64>::default();
        let slow = latency.clone();
        let shared = (mute.clone(), garble.clone());
        let (held, cut, lines) = (hold.clone(), is_cut.clone(), near.clone());
        let mut dice = Dice(5);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if cut.load(Ordering::Relaxed) {
                    continue;
                }
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let number = {
                    let mut lines = lines.lock().unwrap();
                    lines.push(client.try_clone().unwrap());
                    lines.len()
                };
                let held = held.clone();
                let (slow, back) = (slow.clone(), slow.clone());
                thread::spawn(move || {
                    pass(from, to, |_| {
                        wait(&slow);
                        while number <= held.load(Ordering::Relaxed) {
                            thread::sleep(Duration::from_millis(1));
                        }
                        true
                    });
                });
                let (mute, garble) = shared.clone();
                let mut dice = Dice(dice.roll(usize::MAX) as u64);
                thread::spawn(move || {
                    pass(server, client, |bytes| {
                        wait(&back);
                        if garble.load(Ordering::Relaxed) && dice.roll(20) == 0 {
                            bytes[dice.roll(bytes.len())] = b"0-:$*\r\n \xffx9_#"[dice.roll(13)];
                        }
                        !mute.load(Ordering::Relaxed)
                    });
                });
            }
        });
        Self { address, mute, garble, hold, is_cut, latency, near }
    }

    /// Delays everything by `one_way` in each direction.
    pub fn set_latency(&self, one_way: Duration) {
        self.latency.store(one_way.as_micros() as u64, Ordering::Relaxed);
    }

    /// From now on answers are lost, or no longer.
    pub fn lose_answers(&self, lose: bool) {
        self.mute.store(lose, Ordering::Relaxed);
    }

    /// From now on what is sent on the lines there are waits on its way, or goes on.
    pub fn hold_requests(&self, hold: bool) {
        let lines = if hold { self.near.lock().unwrap().len() } else { 0 };
        self.hold.store(lines, Ordering::Relaxed);
    }

    /// Ends all lines as the router sees them, and refuses new ones; or takes them again.
    pub fn cut(&self, cut: bool) {
        self.is_cut.store(cut, Ordering::Relaxed);
        if cut {
            let lines = self.near.lock().unwrap();
            lines.iter().for_each(|line| drop(line.shutdown(Shutdown::Both)));
        }
    }

    /// From now on one of twenty answers has a wrong byte, or no longer.
    pub fn garble_answers(&self, garble: bool) {
        self.garble.store(garble, Ordering::Relaxed);
    }
}

fn wait(latency: &AtomicU64) {
    let micros = latency.load(Ordering::Relaxed);
    if micros > 0 {
        thread::sleep(Duration::from_micros(micros));
    }
}

/// Carries what comes; `look` may change it, and says whether it arrives.
fn pass(mut from: TcpStream, mut to: TcpStream, mut look: impl FnMut(&mut [u8]) -> bool) {
    let mut bytes = [0; 16 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if look(&mut bytes[..count]) && to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}
