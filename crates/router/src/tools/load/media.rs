//! Media streams of a load, and their measurements.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use serde::Serialize;

use super::report::{Latency, histogram};
use crate::tools::provider_stream::{
    Clip, Dialer, Echo, Echoes, MediaFormat, ProviderStream, StreamError,
};

/// Measurements of the streams while a load runs.
pub(super) struct MediaCounts(Mutex<Measurements>);

struct Measurements {
    connect: Histogram<u64>,
    round_trip: Histogram<u64>,
    gap: Histogram<u64>,
    open: u64,
    frames: Frames,
    audio: AudioMeasurements,
}

/// Correlation of the agents' audio with the clip below which an echo counts as another audio.
const SAME_AUDIO: f64 = 0.95;

#[derive(Default)]
struct AudioMeasurements {
    compared: u64,
    differing: u64,
    lowest: Option<f64>,
}

/// Results of streams that sent a clip.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct AudioReport {
    /// Streams whose audio was compared with the clip.
    pub compared: u64,
    /// Streams whose audio was another one: their correlation is below 0.95.
    pub differing: u64,
    pub lowest_correlation: Option<f64>,
}

/// Counts of frames.
#[derive(Debug, Clone, Copy, Default, Serialize, PartialEq, Eq)]
pub struct Frames {
    pub sent: u64,
    /// Different frames that came back to their call.
    pub echoed: u64,
    pub lost: u64,
    pub out_of_order: u64,
    pub duplicated: u64,
    /// Frames of another call.
    pub foreign: u64,
}

impl Frames {
    fn add(&mut self, echoes: &Echoes) {
        self.sent += u64::from(echoes.sent);
        self.echoed += u64::from(echoes.echoed);
        self.lost += u64::from(echoes.lost());
        self.out_of_order += u64::from(echoes.out_of_order);
        self.duplicated += u64::from(echoes.duplicated);
        self.foreign += u64::from(echoes.foreign);
    }
}

/// Results of the streams of a load.
#[derive(Debug, Clone, Serialize)]
pub struct MediaReport {
    pub provider: String,
    /// Streams that opened.
    pub streams: u64,
    /// Counts of frames with a marker; a clip has none.
    pub frames: Frames,
    /// With a clip.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub audio: Option<AudioReport>,
    /// From the beginning of the connection to the end of the handshake.
    pub connect: Latency,
    /// From the sending of a frame to its echo.
    pub round_trip: Latency,
    /// Between two echoes of a stream.
    pub gap: Latency,
}

impl Default for MediaCounts {
    fn default() -> Self {
        let [connect, round_trip, gap] = [histogram(), histogram(), histogram()];
        let frames = Frames::default();
        let audio = AudioMeasurements::default();
        Self(Mutex::new(Measurements { connect, round_trip, gap, open: 0, frames, audio }))
    }
}

impl MediaCounts {
    fn lock(&self) -> MutexGuard<'_, Measurements> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a stream.
    pub(super) async fn open(
        &self,
        dialer: &Dialer,
        url: &str,
        format: MediaFormat,
        call: &str,
    ) -> Result<ProviderStream, StreamError> {
        let started = Instant::now();
        let connection = dialer.connect(url).await?;
        let stream = ProviderStream::open(connection, url, format, call).await?;
        let mut measured = self.lock();
        measured.open += 1;
        measured.connect.saturating_record(started.elapsed().as_micros() as u64);
        Ok(stream)
    }

    /// Sends audio through a stream and measures its echoes.
    pub(super) async fn talk(
        &self,
        stream: &mut ProviderStream,
        hold: Duration,
        offset: Duration,
    ) -> Result<(), StreamError> {
        let talked = stream.talk(hold, offset, |echo| self.record(echo)).await;
        self.lock().frames.add(stream.echoes());
        talked
    }

    /// Sends a clip through a stream and compares the agent's audio with it.
    pub(super) async fn play(
        &self,
        stream: &mut ProviderStream,
        clip: &Arc<Clip>,
        hold: Duration,
        offset: Duration,
    ) -> Result<(), StreamError> {
        let (heard, played) = stream.play(clip, hold, offset).await;
        played?;
        let clip = clip.clone();
        // The comparison takes milliseconds of CPU, in which no other stream could send.
        let compared = tokio::task::spawn_blocking(move || clip.compare(&heard)).await;
        let correlation = compared.map_err(|error| StreamError::Other(error.to_string()))?;
        let correlation = correlation.correlation;
        let audio = &mut self.lock().audio;
        audio.compared += 1;
        audio.differing += u64::from(correlation < SAME_AUDIO);
        audio.lowest = Some(audio.lowest.map_or(correlation, |lowest| lowest.min(correlation)));
        Ok(())
    }

    pub(super) fn closed(&self) {
        self.lock().open -= 1;
    }

    fn record(&self, echo: Echo) {
        let mut measured = self.lock();
        measured.round_trip.saturating_record(echo.round_trip.as_micros() as u64);
        if let Some(gap) = echo.gap {
            measured.gap.saturating_record(gap.as_micros() as u64);
        }
    }

    /// Returns the number of open streams and of echoes so far.
    pub(super) fn progress(&self) -> (u64, u64) {
        let measured = self.lock();
        (measured.open, measured.round_trip.len())
    }

    pub(super) fn report(&self, format: MediaFormat, has_clip: bool) -> MediaReport {
        let measured = self.lock();
        let AudioMeasurements { compared, differing, lowest } = measured.audio;
        let audio = AudioReport { compared, differing, lowest_correlation: lowest };
        MediaReport {
            provider: format.to_string(),
            streams: measured.connect.len(),
            frames: measured.frames,
            audio: has_clip.then_some(audio),
            connect: Latency::of(&measured.connect),
            round_trip: Latency::of(&measured.round_trip),
            gap: Latency::of(&measured.gap),
        }
    }
}
