//! How many connections there may be at a time. When there are as many, the next takes the
//! place of one that is silent: who opens connections and says nothing keeps nobody out.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use prometheus_client::metrics::counter::Counter;
use tokio_util::sync::CancellationToken;

/// Files that the router needs besides connections of clients.
const OWN_FILES: usize = 128;
/// How long a newcomer may take until its first answer before it counts as idle.
const GRACE: Duration = Duration::from_secs(2);
/// Fewer connections than this are hardly of use.
const FEW: usize = 64;
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
    /// We have begun to answer, and wait for more of the request.
    awaits_body: AtomicBool,
    /// When it came, on the crowd's clock (ms).
    came: u64,
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
        if files < most {
            let most = files.max(FEW);
            tracing::warn!(
                most,
                "the limit of open files allows fewer connections than are wanted"
            );
        }
        Arc::new(Self {
            most: most.min(files.max(FEW)),
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
            let now = self.time();
            let silent = present.seats.values().filter(|seat| seat.is_clients_turn());
            let number = silent.min_by_key(|seat| seat.worth(now))?.number;
            if let Some(seat) = present.seats.remove(&number) {
                seat.leave.cancel();
            }
        }
        present.last += 1;
        let came = self.time();
        let seat = Arc::new(Seat {
            number: present.last,
            crowd: self.clone(),
            turns: AtomicUsize::new(0),
            awaits_body: AtomicBool::new(false),
            came,
            heard: AtomicU64::new(came),
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

    /// Whether we wait for the client: for a request, or for the rest of one.
    pub fn is_clients_turn(&self) -> bool {
        self.turn().is_multiple_of(2) || self.awaits_body.load(Ordering::Relaxed)
    }

    pub fn await_body(&self, awaits: bool) {
        self.awaits_body.store(awaits, Ordering::Relaxed);
    }

    /// First goes who was never answered and has had the time to ask, then who was answered
    /// before; who has just come goes last. Of equals, who was silent for longest.
    fn worth(&self, now: u64) -> (u8, u64) {
        let is_new = now.saturating_sub(self.came) < GRACE.as_millis() as u64;
        let class = match (self.turn() > 1, is_new) {
            (false, false) => 0,
            (true, _) => 1,
            (false, true) => 2,
        };
        (class, self.heard.load(Ordering::Relaxed))
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

    /// A crowd of three, who came long ago.
    fn three() -> (Arc<Crowd>, [Seated; 3]) {
        let crowd = Crowd::new(3, Counter::default());
        let crowd = Arc::into_inner(crowd).unwrap();
        let started = crowd.started.checked_sub(2 * GRACE).unwrap();
        let crowd = Arc::new(Crowd { started, ..crowd });
        let seats = [(); 3].map(|()| {
            let mut seated = crowd.enter().unwrap();
            let number = seated.0.number;
            let present = &mut crowd.present().seats;
            drop(present.remove(&number));
            Arc::get_mut(&mut seated.0).unwrap().came = 0;
            present.insert(number, seated.0.clone());
            seated
        });
        (crowd, seats)
    }

    fn answered(seated: &Seated) {
        seated.0.change_turn();
        seated.0.change_turn();
    }

    fn is_gone(seated: &Seated) -> bool {
        seated.0.leave.is_cancelled()
    }

    #[test]
    fn one_too_many_takes_the_place_of_one_that_is_silent() {
        let (crowd, [first, second, third]) = three();
        first.0.change_turn();
        answered(&second);
        second.0.heard.store(1, Ordering::Relaxed);
        let fourth = crowd.enter().unwrap();
        assert!(is_gone(&third), "it has never asked for anything");
        let fifth = crowd.enter().unwrap();
        assert!(is_gone(&second), "it has been silent for longest, and the fourth has just come");
        first.0.await_body(true);
        let sixth = crowd.enter().unwrap();
        assert!(is_gone(&first), "it was never answered, and keeps us waiting");
        [&fourth, &fifth, &sixth].iter().for_each(|seated| seated.0.change_turn());
        assert!(crowd.enter().is_none(), "all are being answered");
        assert_eq!(crowd.turned_away.get(), 4);
        drop(fourth);
        assert!(crowd.enter().is_some());
    }

    #[test]
    fn newcomers_do_not_take_each_others_places() {
        let (crowd, idle) = three();
        idle.iter().for_each(answered);
        let fresh = [(); 3].map(|()| crowd.enter().unwrap());
        assert!(idle.iter().all(is_gone));
        assert!(!fresh.iter().any(is_gone));
        let _seventh = crowd.enter().unwrap();
        assert_eq!(fresh.iter().filter(|seated| is_gone(seated)).count(), 1, "there is no other");
    }

    #[test]
    fn the_limit_of_files_is_known() {
        assert!(open_files().is_some_and(|files| files > OWN_FILES));
    }
}
