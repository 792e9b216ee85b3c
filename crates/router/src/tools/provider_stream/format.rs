//! Media formats of the providers.

use std::{fmt, str::FromStr, time::Duration};

use telephony::Provider;

/// How a provider carries audio over its media WebSocket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MediaFormat {
    pub provider: Provider,
}

/// Encoding of audio samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    /// G.711 μ-law, one byte per sample.
    MuLaw,
    /// Signed 16-bit PCM, little-endian.
    Linear16,
}

impl MediaFormat {
    /// Audio per media message.
    pub(crate) fn frame_duration(self) -> Duration {
        match self.provider {
            Provider::Exotel => Duration::from_millis(100),
            _ => Duration::from_millis(20),
        }
    }

    /// Number of media messages for this much audio, at least one.
    pub(crate) fn frames_in(self, audio: Duration) -> u32 {
        let frames = audio.as_millis().div_ceil(self.frame_duration().as_millis());
        u32::try_from(frames).unwrap_or(u32::MAX).max(1)
    }

    /// The WebSocket subprotocol that the provider requests.
    pub fn subprotocol(self) -> Option<&'static str> {
        (self.provider == Provider::Jambonz).then_some("audio.jambonz.org")
    }

    /// Whether audio is sent in binary messages, without JSON.
    pub fn is_binary(self) -> bool {
        matches!(self.provider, Provider::Vonage | Provider::Jambonz)
    }

    pub(super) fn encoding(self) -> Encoding {
        match self.provider {
            Provider::Exotel | Provider::Vonage | Provider::Jambonz => Encoding::Linear16,
            _ => Encoding::MuLaw,
        }
    }

    /// Samples per second.
    pub(super) fn sample_rate(self) -> u32 {
        match self.provider {
            Provider::Vonage => 16_000,
            _ => 8_000,
        }
    }

    /// One media message's worth of silence.
    pub(super) fn silence(self) -> Vec<u8> {
        let samples = self.sample_rate() as usize * self.frame_duration().as_millis() as usize;
        let samples = samples / 1_000;
        match self.encoding() {
            Encoding::MuLaw => vec![0xff; samples],
            Encoding::Linear16 => vec![0; samples * 2],
        }
    }
}

impl From<Provider> for MediaFormat {
    fn from(provider: Provider) -> Self {
        Self { provider }
    }
}

impl FromStr for MediaFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let provider: Result<Provider, _> = name.parse();
        provider.map(Self::from).map_err(|_| {
            let names = Provider::ALL.map(Provider::as_str);
            let [others @ .., last] = &names;
            format!("{} or {last}", others.join(", "))
        })
    }
}

impl fmt::Display for MediaFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.provider.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_is_named_after_its_provider() {
        for provider in Provider::ALL {
            let format: MediaFormat = provider.as_str().parse().unwrap();
            assert_eq!((format.provider, format.to_string()), (provider, provider.to_string()));
        }
        let expected = "twilio, plivo, exotel, signalwire, telnyx, vonage or jambonz";
        assert_eq!("skype".parse::<MediaFormat>(), Err(expected.into()));
    }

    #[test]
    fn frames_have_the_documented_sizes() {
        let size = |provider| MediaFormat::from(provider).silence().len();
        let sizes = Provider::ALL.map(|provider| (provider.as_str(), size(provider)));
        assert_eq!(
            sizes,
            [
                ("twilio", 160),
                ("plivo", 160),
                ("exotel", 1_600),
                ("signalwire", 160),
                ("telnyx", 160),
                ("vonage", 640),
                ("jambonz", 320),
            ]
        );
        assert_eq!(MediaFormat::from(Provider::Exotel).frames_in(Duration::from_secs(5)), 50);
        assert_eq!(MediaFormat::from(Provider::Twilio).frames_in(Duration::from_secs(5)), 250);
        assert_eq!(MediaFormat::from(Provider::Twilio).frames_in(Duration::ZERO), 1);
    }
}
