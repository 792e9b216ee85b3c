//! A line to Redis that can lose answers.

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

pub struct Proxy {
    pub address: SocketAddr,
    mute: Arc<AtomicBool>,
}

impl Proxy {
    pub fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, mute) = (listener.local_addr().unwrap(), Arc::new(AtomicBool::new(false)));
        let shared = mute.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                thread::spawn(move || pass(from, to, &AtomicBool::new(false)));
                let mute = shared.clone();
                thread::spawn(move || pass(server, client, &mute));
            }
        });
        Self { address, mute }
    }

    /// From now on answers are lost, or no longer.
    pub fn lose_answers(&self, lose: bool) {
        self.mute.store(lose, Ordering::Relaxed);
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, mute: &AtomicBool) {
    let mut bytes = [0; 16 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if !mute.load(Ordering::Relaxed) && to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}
