//! Checks the echoed frames of one stream: each frame comes back once, in order, to its call.

use super::marker::Marker;

/// Counts of the frames of one stream.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Echoes {
    call: u64,
    pub sent: u32,
    /// Different frames of this call that came back.
    pub echoed: u32,
    /// Frames that came back after a later one.
    pub out_of_order: u32,
    /// Frames that came back again.
    pub duplicated: u32,
    /// Frames of another call, or that this stream has not sent.
    pub foreign: u32,
    /// Audio without a marker: the agent's own.
    pub unmarked: u32,
    /// One more than the highest sequence number that came back.
    next: u32,
    /// One bit per frame that came back.
    seen: Vec<u64>,
}

impl Echoes {
    pub(super) fn new(call: u64) -> Self {
        Self { call, ..Self::default() }
    }

    /// Records an echoed frame; returns whether it came back to its call for the first time.
    pub(super) fn record(&mut self, marker: Marker) -> bool {
        if marker.call != self.call || marker.sequence >= self.sent {
            self.foreign += 1;
            return false;
        }
        let (word, bit) = (marker.sequence as usize / 64, 1 << (marker.sequence % 64));
        if self.seen.len() <= word {
            self.seen.resize(word + 1, 0);
        }
        if self.seen[word] & bit != 0 {
            self.duplicated += 1;
            return false;
        }
        self.seen[word] |= bit;
        self.echoed += 1;
        if marker.sequence < self.next {
            self.out_of_order += 1;
        } else {
            self.next = marker.sequence + 1;
        }
        true
    }

    /// Frames that have not come back.
    pub fn lost(&self) -> u32 {
        self.sent - self.echoed
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Records frames of call 7, of which 100 were sent.
    fn record(sequences: &[u32]) -> Echoes {
        let mut echoes = Echoes { sent: 100, ..Echoes::new(7) };
        for &sequence in sequences {
            echoes.record(Marker { call: 7, sequence, sent: Duration::ZERO });
        }
        echoes
    }

    #[test]
    fn frames_in_order_are_only_counted() {
        let echoes = record(&(0..100).collect::<Vec<_>>());
        assert_eq!((echoes.echoed, echoes.lost()), (100, 0));
        assert_eq!((echoes.out_of_order, echoes.duplicated, echoes.foreign), (0, 0, 0));
    }

    #[test]
    fn late_repeated_and_missing_frames_are_told_apart() {
        let echoes = record(&[0, 2, 1, 3, 3, 70]);
        assert_eq!((echoes.echoed, echoes.lost()), (5, 95));
        assert_eq!((echoes.out_of_order, echoes.duplicated, echoes.foreign), (1, 1, 0));
    }

    #[test]
    fn a_frame_of_another_call_is_foreign() {
        let mut echoes = record(&[0]);
        assert!(!echoes.record(Marker { call: 8, sequence: 1, sent: Duration::ZERO }));
        assert!(!echoes.record(Marker { call: 7, sequence: 100, sent: Duration::ZERO }));
        assert_eq!((echoes.echoed, echoes.foreign), (1, 2));
    }
}
