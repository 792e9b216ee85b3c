//! Audio of a caller, encoded as a provider sends it, and the agent's audio that comes back.

use std::{fs::File, io::BufWriter, path::Path, time::Duration};

use anyhow::Context;
use hound::WavWriter;

use super::{
    format::{Encoding, MediaFormat},
    mulaw,
    similarity::{Similarity, compare},
    wav,
};

/// Audio of a WAV file in a provider's format.
#[derive(Debug)]
pub struct Clip {
    format: MediaFormat,
    /// The samples that a lossless echo has.
    samples: Vec<i16>,
    encoded: Vec<u8>,
}

impl Clip {
    /// Reads a file, and converts it to mono at the provider's rate.
    pub fn read(path: &Path, format: MediaFormat) -> anyhow::Result<Self> {
        let samples = wav::read(path, format.sample_rate())
            .with_context(|| format!("cannot use {} as audio", path.display()))?;
        let encoded = format.encode(&samples);
        Ok(Self { format, samples: format.decode(&encoded), encoded })
    }

    pub fn duration(&self) -> Duration {
        self.format.duration_of(self.encoded.len())
    }

    /// The audio of one media message; silence after the end of the clip.
    pub(super) fn frame(&self, number: u32) -> Vec<u8> {
        let mut frame = self.format.silence();
        let rest = self.encoded.get(number as usize * frame.len()..).unwrap_or_default();
        let count = rest.len().min(frame.len());
        frame[..count].copy_from_slice(&rest[..count]);
        frame
    }

    /// Compares the agent's audio with this clip.
    pub fn compare(&self, heard: &Heard) -> Similarity {
        compare(&self.samples, &heard.samples())
    }
}

/// The agent's audio, in the provider's format and in order of arrival.
#[derive(Debug, Clone)]
pub struct Heard {
    pub(super) format: MediaFormat,
    pub(super) encoded: Vec<u8>,
}

impl Heard {
    pub fn duration(&self) -> Duration {
        self.format.duration_of(self.encoded.len())
    }

    fn samples(&self) -> Vec<i16> {
        self.format.decode(&self.encoded)
    }
}

/// A WAV file for the agent's audio.
pub struct Recording(WavWriter<BufWriter<File>>);

impl Recording {
    pub fn create(path: &Path, format: MediaFormat) -> anyhow::Result<Self> {
        wav::create(path, format.sample_rate()).map(Self)
    }

    pub fn write(mut self, heard: &Heard) -> anyhow::Result<()> {
        for sample in heard.samples() {
            self.0.write_sample(sample)?;
        }
        Ok(self.0.finalize()?)
    }
}

impl MediaFormat {
    fn encode(self, samples: &[i16]) -> Vec<u8> {
        match self.encoding() {
            Encoding::MuLaw => samples.iter().map(|&sample| mulaw::encode(sample)).collect(),
            Encoding::Linear16 => samples.iter().flat_map(|sample| sample.to_le_bytes()).collect(),
        }
    }

    fn decode(self, encoded: &[u8]) -> Vec<i16> {
        match self.encoding() {
            Encoding::MuLaw => encoded.iter().map(|&byte| mulaw::decode(byte)).collect(),
            Encoding::Linear16 => {
                encoded.as_chunks().0.iter().map(|&pair| i16::from_le_bytes(pair)).collect()
            }
        }
    }

    fn duration_of(self, bytes: usize) -> Duration {
        self.frame_duration().mul_f64(bytes as f64 / self.silence().len() as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use telephony::Provider;

    #[test]
    fn a_clip_is_cut_into_frames_and_followed_by_silence() {
        for provider in Provider::ALL {
            let format = MediaFormat::from(provider);
            let frame = format.silence().len();
            let samples: Vec<i16> = (0..4_000).map(|it| it * 8 - 16_000).collect();
            let encoded = format.encode(&samples);
            let clip = Clip { format, samples: format.decode(&encoded), encoded };
            let frames = format.frames_in(clip.duration());
            let sent: Vec<u8> = (0..frames).flat_map(|number| clip.frame(number)).collect();
            assert_eq!(sent[..clip.encoded.len()], clip.encoded, "{provider}");
            assert!(sent.len() - clip.encoded.len() < frame, "{provider}");
            assert_eq!(clip.frame(frames), format.silence(), "{provider}");
            let heard = Heard { format, encoded: sent };
            assert!(clip.compare(&heard).correlation > 0.999, "{provider}");
        }
    }
}
