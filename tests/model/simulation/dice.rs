//! Chance, from a seed.

use fleet::Millis;

/// SplitMix64: small, and the same everywhere.
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, sides: usize) -> usize {
        (self.next() % sides as u64) as usize
    }

    pub(super) fn between(&mut self, least: Millis, most: Millis) -> Millis {
        least + self.next() % (most - least + 1)
    }

    /// So many times in a hundred.
    pub(super) fn percent(&mut self, chance: usize) -> bool {
        self.below(100) < chance
    }
}
