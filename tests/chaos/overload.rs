//! More requests than the store can take.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{
    callers::{Caller, USUAL},
    history::Outcome,
    world::World,
};
use crate::support::chance::Dice;

/// What the store takes of each router, per second.
const CAP: u32 = 100;
/// Who asks, each ten times a second: ten times as much as three routers can do.
const ASKING: usize = 300;
const TIME: Duration = Duration::from_secs(2);

pub fn flood(world: &World, is_plain: bool) {
    world.history.fault("too many requests");
    for seat in &world.seats {
        seat.to_redis.set(|faults| faults.cap = Some(CAP));
    }
    thread::scope(|scope| {
        for number in 0..ASKING {
            let mut caller = Caller { world, style: USUAL, dice: Dice(number as u64), is_plain };
            scope.spawn(move || {
                let began = Instant::now();
                thread::sleep(Duration::from_micros(100_000 / ASKING as u64 * number as u64));
                while began.elapsed() < TIME {
                    let asked = Instant::now();
                    let call = world.new_call();
                    if let Outcome::Given { pod } = caller.ask(&call, false) {
                        caller.release(&call, &pod);
                    }
                    thread::sleep(Duration::from_millis(100).saturating_sub(asked.elapsed()));
                }
            });
        }
    });
}
