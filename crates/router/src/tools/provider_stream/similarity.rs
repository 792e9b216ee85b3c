//! Similarity of two recordings, whatever the delay between them.

use std::f64::consts::PI;

/// How well a recording matches another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Similarity {
    /// Highest correlation of the waveforms over all delays: 1 for the same waveform, about 0 for
    /// unrelated ones. Missing and additional audio lower it, silence does not.
    pub correlation: f64,
    /// Samples by which the recording is later; negative if its beginning is missing.
    pub delay: isize,
}

/// Compares what was heard with what was sent.
pub(super) fn compare(sent: &[i16], heard: &[i16]) -> Similarity {
    let energy = |samples: &[i16]| samples.iter().map(|&it| f64::from(it).powi(2)).sum::<f64>();
    let scale = (energy(sent) * energy(heard)).sqrt();
    if scale == 0.0 {
        return Similarity { correlation: 0.0, delay: 0 };
    }
    // The correlation for every delay at once: a product in the frequency domain. The length
    // has room for every delay, so that the cyclic result does not overlap.
    let length = (sent.len() + heard.len()).next_power_of_two();
    let [sent, heard] = [sent, heard].map(|samples| {
        let mut values: Vec<Complex> = samples.iter().map(|&it| (f64::from(it), 0.0)).collect();
        values.resize(length, (0.0, 0.0));
        transform(&mut values);
        values
    });
    let mut product: Vec<Complex> =
        sent.iter().zip(&heard).map(|(&(a, b), &(c, d))| (a * c + b * d, b * c - a * d)).collect();
    // The transform of the conjugate is that of the inverse, but for its scale.
    transform(&mut product);
    let (delay, highest) = product
        .iter()
        .map(|&(real, _)| real)
        .enumerate()
        .max_by(|one, other| one.1.total_cmp(&other.1))
        .unwrap_or_default();
    let delay = if delay < length / 2 { delay as isize } else { delay as isize - length as isize };
    Similarity { correlation: highest / length as f64 / scale, delay }
}

type Complex = (f64, f64);

/// Discrete Fourier transform in place (radix 2); the length is a power of two.
fn transform(values: &mut [Complex]) {
    let length = values.len();
    let bits = length.trailing_zeros();
    for index in 0..length {
        let reversed = index.reverse_bits() >> (usize::BITS - bits.max(1));
        if index < reversed {
            values.swap(index, reversed);
        }
    }
    let mut half = 1;
    while half < length {
        let factors: Vec<Complex> = (0..half)
            .map(|it| {
                let (sin, cos) = (-PI * it as f64 / half as f64).sin_cos();
                (cos, sin)
            })
            .collect();
        for block in values.chunks_exact_mut(2 * half) {
            let (low, high) = block.split_at_mut(half);
            for ((one, other), &(cos, sin)) in low.iter_mut().zip(high).zip(&factors) {
                let turned = (other.0 * cos - other.1 * sin, other.0 * sin + other.1 * cos);
                *other = (one.0 - turned.0, one.1 - turned.1);
                *one = (one.0 + turned.0, one.1 + turned.1);
            }
        }
        half *= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Noise that is the same in each run.
    fn noise(count: usize, mut seed: u32) -> Vec<i16> {
        let next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 17) as i16 - 16_384
        };
        std::iter::repeat_with(next).take(count).collect()
    }

    /// Correlation at one delay, computed sample by sample.
    fn correlation_at(sent: &[i16], heard: &[i16], delay: isize) -> f64 {
        let energy = |it: &[i16]| it.iter().map(|&it| f64::from(it).powi(2)).sum::<f64>();
        let products = sent.iter().enumerate().filter_map(|(index, &sample)| {
            let other = heard.get(usize::try_from(index as isize + delay).ok()?)?;
            Some(f64::from(sample) * f64::from(*other))
        });
        products.sum::<f64>() / (energy(sent) * energy(heard)).sqrt()
    }

    #[test]
    fn a_delayed_copy_is_the_same_waveform() {
        let sent = noise(1_000, 1);
        for delay in [0, 1, 37, 700] {
            let heard = [vec![0; delay], sent.clone()].concat();
            let Similarity { correlation, delay: found } = compare(&sent, &heard);
            assert!((correlation - 1.0).abs() < 1e-9, "{delay}: {correlation}");
            assert_eq!(found, delay as isize);
        }
    }

    #[test]
    fn the_result_is_that_of_the_definition() {
        let sent = noise(300, 1);
        let mut heard = noise(260, 2);
        for (index, sample) in heard.iter_mut().enumerate() {
            *sample = *sample / 4 + sent.get(index + 20).copied().unwrap_or_default() / 2;
        }
        let Similarity { correlation, delay } = compare(&sent, &heard);
        assert_eq!(delay, -20, "the beginning is missing");
        assert!((correlation - correlation_at(&sent, &heard, delay)).abs() < 1e-9);
    }

    #[test]
    fn other_audio_and_missing_audio_are_less_similar() {
        let sent = noise(4_000, 1);
        assert!(compare(&sent, &noise(4_000, 9)).correlation < 0.2);
        assert!(compare(&sent, &sent[..3_000]).correlation < 0.9);
        let interrupted = [&sent[..2_000], &[0; 400], &sent[2_000..]].concat();
        assert!(compare(&sent, &interrupted).correlation < 0.8);
        assert_eq!(compare(&sent, &[]).correlation, 0.0);
        assert_eq!(compare(&sent, &[0; 100]).correlation, 0.0);
    }
}
