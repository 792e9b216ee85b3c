//! A line to Redis that can lose answers, or garble them.

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use super::chance::Dice;

pub struct Proxy {
    pub address: SocketAddr,
    mute: Arc<AtomicBool>,
    garble: Arc<AtomicBool>,
}

impl Proxy {
    pub fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (mute, garble) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let shared = (mute.clone(), garble.clone());
        let mut dice = Dice(5);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                thread::spawn(move || pass(from, to, |_| true));
                let (mute, garble) = shared.clone();
                let mut dice = Dice(dice.roll(usize::MAX) as u64);
                thread::spawn(move || {
                    pass(server, client, |bytes| {
                        if garble.load(Ordering::Relaxed) && dice.roll(20) == 0 {
                            bytes[dice.roll(bytes.len())] = b"0-:$*\r\n \xffx9_#"[dice.roll(13)];
                        }
                        !mute.load(Ordering::Relaxed)
                    });
                });
            }
        });
        Self { address, mute, garble }
    }

    /// From now on answers are lost, or no longer.
    pub fn lose_answers(&self, lose: bool) {
        self.mute.store(lose, Ordering::Relaxed);
    }

    /// From now on one of twenty answers has a wrong byte, or no longer.
    pub fn garble_answers(&self, garble: bool) {
        self.garble.store(garble, Ordering::Relaxed);
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
