//! WAV files: any rate, sample size and number of channels is read as mono at a given rate; the
//! result of a call is written as 16-bit PCM.

use std::{f64::consts::PI, fs::File, io::BufWriter, path::Path};

use anyhow::{Context, bail, ensure};
use hound::{SampleFormat, WavReader, WavSpec, WavWriter};

/// A file is held in memory, for each stream of a load in its encoded form.
const MAX_SECONDS: u32 = 120;
/// Zero crossings of the low-pass filter on each side of a sample.
const FILTER_WIDTH: f64 = 16.0;
/// Entries of the filter's table per sample.
const TABLE_STEPS: f64 = 128.0;

/// Reads a file as mono samples at `rate`.
pub(super) fn read(path: &Path, rate: u32) -> anyhow::Result<Vec<i16>> {
    let mut reader = WavReader::open(path)?;
    let WavSpec { channels, sample_rate, bits_per_sample, sample_format } = reader.spec();
    ensure!((1_000..=384_000).contains(&sample_rate), "its rate of {sample_rate} Hz is not usual");
    ensure!(channels > 0, "it has no channels");
    if reader.duration() > MAX_SECONDS * sample_rate {
        bail!("it has more than {MAX_SECONDS} seconds of audio");
    }
    let interleaved: Vec<f64> = match sample_format {
        SampleFormat::Float => {
            reader.samples::<f32>().map(|sample| sample.map(f64::from)).collect::<Result<_, _>>()?
        }
        SampleFormat::Int => {
            let full_scale = f64::from(1u32 << (bits_per_sample - 1));
            let samples = reader.samples::<i32>();
            samples.map(|it| it.map(|it| f64::from(it) / full_scale)).collect::<Result<_, _>>()?
        }
    };
    let channels = usize::from(channels);
    let mono: Vec<f64> = interleaved
        .chunks_exact(channels)
        .map(|frame| frame.iter().sum::<f64>() / channels as f64)
        .collect();
    ensure!(!mono.is_empty(), "it has no audio");
    let scaled = resample(&mono, sample_rate, rate).into_iter().map(|it| (it * 32_767.0) as i16);
    Ok(scaled.collect())
}

/// Creates a mono file of 16-bit samples.
pub(super) fn create(path: &Path, rate: u32) -> anyhow::Result<WavWriter<BufWriter<File>>> {
    let spec = WavSpec {
        channels: 1,
        sample_rate: rate,
        bits_per_sample: 16,
        sample_format: SampleFormat::Int,
    };
    WavWriter::create(path, spec).with_context(|| format!("cannot write {}", path.display()))
}

/// Changes the rate with a windowed sinc filter, which removes frequencies that the new rate
/// cannot represent.
fn resample(samples: &[f64], from: u32, to: u32) -> Vec<f64> {
    if from == to {
        return samples.to_vec();
    }
    let step = f64::from(from) / f64::from(to);
    // Cut-off in units of the old rate's Nyquist frequency.
    let cutoff = (1.0 / step).min(1.0);
    let reach = FILTER_WIDTH / cutoff;
    // The filter is a table: its sines would take most of the time.
    let entries = (reach * TABLE_STEPS) as usize + 2;
    let entry = |index: usize| kernel(index as f64 / TABLE_STEPS, cutoff, reach);
    let table: Vec<f64> = (0..entries).map(entry).collect();
    let weight = |distance: f64| {
        let place = distance.abs() * TABLE_STEPS;
        let [low, high] = [0, 1].map(|next| table[(place as usize + next).min(entries - 1)]);
        low + (high - low) * place.fract()
    };
    let count = (samples.len() as f64 / step) as usize;
    let at = |index: usize| {
        let centre = index as f64 * step;
        let first = (centre - reach).ceil().max(0.0) as usize;
        let last = ((centre + reach) as usize).min(samples.len().saturating_sub(1));
        (first..=last).map(|near| samples[near] * weight(near as f64 - centre)).sum()
    };
    (0..count).map(at).collect()
}

fn kernel(distance: f64, cutoff: f64, reach: f64) -> f64 {
    let angle = PI * distance * cutoff;
    let sinc = if angle.abs() < 1e-9 { 1.0 } else { angle.sin() / angle };
    let window = 0.5 + 0.5 * (PI * distance / reach).cos();
    cutoff * sinc * window
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tone(frequency: f64, rate: u32, seconds: f64) -> Vec<f64> {
        let count = (f64::from(rate) * seconds) as usize;
        (0..count).map(|it| (2.0 * PI * frequency * it as f64 / f64::from(rate)).sin()).collect()
    }

    fn power(samples: &[f64]) -> f64 {
        samples.iter().map(|it| it * it).sum::<f64>() / samples.len() as f64
    }

    #[test]
    fn a_tone_keeps_its_frequency_and_level_at_another_rate() {
        for (from, to) in [(44_100, 8_000), (48_000, 16_000), (8_000, 16_000), (22_050, 8_000)] {
            let changed = resample(&tone(440.0, from, 0.5), from, to);
            let expected = tone(440.0, to, 0.5);
            assert_eq!(changed.len(), expected.len(), "{from} to {to}");
            // The filter has no samples before the beginning and after the end.
            let inner = 200..expected.len() - 200;
            let differences: Vec<f64> =
                inner.map(|index| changed[index] - expected[index]).collect();
            assert!(power(&differences) < 1e-4, "{from} to {to}");
        }
    }

    #[test]
    fn frequencies_above_the_new_rate_are_removed() {
        let changed = resample(&tone(6_000.0, 48_000, 0.5), 48_000, 8_000);
        assert!(power(&changed[200..3_800]) < 1e-3);
    }

    #[test]
    fn files_of_several_forms_are_read_as_mono() {
        let path = std::env::temp_dir().join(format!("wav-{}.wav", std::process::id()));
        for (bits_per_sample, sample_format, channels) in
            [(16, SampleFormat::Int, 1), (24, SampleFormat::Int, 2), (32, SampleFormat::Float, 2)]
        {
            let spec = WavSpec { channels, sample_rate: 8_000, bits_per_sample, sample_format };
            let mut writer = WavWriter::create(&path, spec).unwrap();
            for sample in tone(440.0, 8_000, 0.1) {
                for _ in 0..channels {
                    match sample_format {
                        SampleFormat::Float => writer.write_sample((sample / 2.0) as f32).unwrap(),
                        SampleFormat::Int => {
                            let scale = f64::from(1 << (bits_per_sample - 2));
                            writer.write_sample((sample * scale) as i32).unwrap();
                        }
                    }
                }
            }
            writer.finalize().unwrap();
            let samples = read(&path, 8_000).unwrap();
            assert_eq!(samples.len(), 800);
            let loudest = samples.iter().map(|it| it.abs()).max().unwrap();
            assert!((16_000..16_500).contains(&loudest), "{bits_per_sample}: {loudest}");
        }
        std::fs::write(&path, "not audio").unwrap();
        assert!(read(&path, 8_000).is_err());
        std::fs::remove_file(&path).unwrap();
    }
}
