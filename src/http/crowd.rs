//! How many connections there may be at a time. When there are as many, the next takes the
//! place of the one that has been silent for longest: who opens connections and says
//! nothing keeps nobody out.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use prometheus_client::metrics::counter::Counter;
use tokio_util::sync::CancellationToken;

/// Files that the router needs besides connections of clients.
const OWN_FILES: usize = 128;
/// How often a crowd is worth a word.
const WORD: Duration = Duration::from_secs(60);

pub struct Crowd {
    most: usize,
    /// Connections that had to go, or were not let in.
    turned_away: Counter,
    started: Instant,
    present: Mutex<Present>,
}

#[derive(Default)]
struct Present {
    seats: HashMap<u64, Arc<Seat>>,
    last: u64,
    told: Option<Instant>,
}

/// What is known of a connection while it is there.
pub struct Seat {
    number: u64,
    crowd: Arc<Crowd>,
    /// Whose turn it is: the client's, which may send the head of a request, or ours, which
    /// answer it. Even counts are the client's.
    turns: AtomicUsize,
    /// When something was last said, on the crowd's clock (ms).
    heard: AtomicU64,
    /// Told when another needs its place.
    pub leave: CancellationToken,
}

/// A connection that is there, until this is dropped.
pub struct Seated(pub Arc<Seat>);

impl Drop for Seated {
    fn drop(&mut self) {
        self.0.crowd.present().seats.remove(&self.0.number);
    }
}

impl Crowd {
    /// At most as many as asked for, and as there may be files.
    pub fn new(most: usize, turned_away: Counter) -> Arc<Self> {
        let files = open_files().map_or(usize::MAX, |files| files.saturating_sub(OWN_FILES));
        Arc::new(Self {
            most: most.min(files).max(1),
            turned_away,
            started: Instant::now(),
            present: Mutex::default(),
        })
    }

    fn present(&self) -> MutexGuard<'_, Present> {
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn time(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Lets a connection in, in the place of a silent one if it must. None if all others
    /// are being served.
    pub fn enter(self: &Arc<Self>) -> Option<Seated> {
        let mut present = self.present();
        if present.seats.len() >= self.most {
            self.turned_away.inc();
            let is_news = present.told.is_none_or(|told| told.elapsed() > WORD);
            if is_news {
                present.told = Some(Instant::now());
                tracing::warn!(most = self.most, "as many connections as there may be");
            }
            let silent = present.seats.values().filter(|seat| seat.is_clients_turn());
            let number = silent.min_by_key(|seat| seat.worth())?.number;
            if let Some(seat) = present.seats.remove(&number) {
                seat.leave.cancel();
            }
        }
        present.last += 1;
        let seat = Arc::new(Seat {
            number: present.last,
            crowd: self.clone(),
            turns: AtomicUsize::new(0),
            heard: AtomicU64::new(self.time()),
            leave: CancellationToken::new(),
        });
        present.seats.insert(seat.number, seat.clone());
        Some(Seated(seat))
    }
}

impl Seat {
    pub fn change_turn(&self) {
        self.turns.fetch_add(1, Ordering::Relaxed);
    }

    pub fn turn(&self) -> usize {
        self.turns.load(Ordering::Relaxed)
    }

    pub fn is_clients_turn(&self) -> bool {
        self.turn().is_multiple_of(2)
    }

    /// Who has never asked for anything goes first, then who was silent for longest.
    fn worth(&self) -> (bool, u64) {
        (self.turn() > 0, self.heard.load(Ordering::Relaxed))
    }

    /// Something was said.
    pub fn hear(&self) {
        self.heard.store(self.crowd.time(), Ordering::Relaxed);
    }
}

/// How many files this process may have open, where the system says so.
fn open_files() -> Option<usize> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_too_many_takes_the_place_of_the_most_silent() {
        let crowd = Crowd::new(3, Counter::default());
        let [first, second, third] = [(); 3].map(|()| crowd.enter().unwrap());
        first.0.change_turn();
        second.0.heard.store(5, Ordering::Relaxed);
        third.0.heard.store(4, Ordering::Relaxed);
        let fourth = crowd.enter().unwrap();
        assert!(third.0.leave.is_cancelled(), "it has been silent for longest");
        assert!(!first.0.leave.is_cancelled(), "it is being served");
        assert!(!second.0.leave.is_cancelled());
        second.0.change_turn();
        second.0.change_turn();
        let fifth = crowd.enter().unwrap();
        assert!(fourth.0.leave.is_cancelled(), "the second has asked for something");
        second.0.change_turn();
        fifth.0.change_turn();
        assert!(crowd.enter().is_none(), "all are being served");
        assert_eq!(crowd.turned_away.get(), 3);
        drop(second);
        assert!(crowd.enter().is_some());
    }

    #[test]
    fn the_limit_of_files_is_known() {
        assert!(open_files().is_some_and(|files| files > OWN_FILES));
    }
}
