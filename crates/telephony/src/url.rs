//! WebSocket URLs of agents.

use std::{fmt, str::FromStr};

use crate::CallRequest;
use fleet::names::PodName;

/// The path that the agents' server listens on.
pub const DEFAULT_WS_PATH: &str = "/agent/voice/breeze-buddy/{provider}/callback/{template}{v2}";

const PLACEHOLDERS: [&str; 4] = ["{provider}", "{template}", "{flow}", "{v2}"];

/// The path template after the pod name of a WebSocket URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WsPath(String);

impl FromStr for WsPath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bare = PLACEHOLDERS.iter().fold(text.to_owned(), |text, name| text.replace(name, ""));
        let plain =
            bare.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte));
        if !text.starts_with('/') || !plain || bare.split('/').any(|part| part == "..") {
            return Err(format!(
                "a path that begins with / and contains only letters, digits, / - . _ ~ and the \
                 placeholders {}",
                PLACEHOLDERS.join(" ")
            ));
        }
        Ok(Self(text.into()))
    }
}

impl fmt::Display for WsPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Builds the WebSocket URLs of agents.
#[derive(Debug, Clone)]
pub struct WsUrls {
    pub base: String,
    pub path: WsPath,
}

impl WsUrls {
    pub fn url(&self, pod: &PodName, request: &CallRequest) -> String {
        let mut url = String::with_capacity(256);
        for part in [&self.base, "/ws/pod/", pod.as_str()] {
            url.push_str(part);
        }
        self.path.append(&mut url, request);
        url
    }
}

impl WsPath {
    /// The path of a call.
    pub fn fill(&self, request: &CallRequest) -> String {
        let mut path = String::with_capacity(128);
        self.append(&mut path, request);
        path
    }

    fn append(&self, url: &mut String, request: &CallRequest) {
        let mut path = self.0.as_str();
        while let Some((text, rest)) = path.split_once('{') {
            // A parsed path has no braces besides those of its placeholders.
            let (placeholder, rest) = rest.split_once('}').unwrap_or((rest, ""));
            url.push_str(text);
            url.push_str(match placeholder {
                "provider" => request.provider_name(),
                "template" => request.template.as_str(),
                "flow" => request.flow.as_str(),
                _ if request.flow.as_str() == "v2" => "/v2",
                _ => "",
            });
            path = rest;
        }
        url.push_str(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CallParts, Provider};

    fn url(path: &str, provider: Provider, parts: CallParts<'_>) -> String {
        let urls = WsUrls { base: "wss://voice.example.com".into(), path: path.parse().unwrap() };
        let parts = CallParts { call: Some("CA1"), ..parts };
        urls.url(&"voice-agent-0".parse().unwrap(), &CallRequest::new(provider, parts).unwrap())
    }

    #[test]
    fn the_default_path_is_that_of_the_agents() {
        let none = CallParts::default();
        assert_eq!(
            url(DEFAULT_WS_PATH, Provider::Twilio, none),
            "wss://voice.example.com/ws/pod/voice-agent-0/agent/voice/breeze-buddy/twilio/callback/order-confirmation/v2"
        );
        assert_eq!(
            url(DEFAULT_WS_PATH, Provider::Exotel, none),
            "wss://voice.example.com/ws/pod/voice-agent-0/agent/voice/breeze-buddy/exotel/callback/template/v2"
        );
        let v1 = CallParts { flow: Some("v1"), template: Some("hello"), ..none };
        assert_eq!(
            url(DEFAULT_WS_PATH, Provider::Plivo, v1),
            "wss://voice.example.com/ws/pod/voice-agent-0/agent/voice/breeze-buddy/plivo/callback/hello"
        );
    }

    #[test]
    fn placeholders_are_replaced_and_invalid_paths_refused() {
        let parts = CallParts { flow: Some("v7"), ..CallParts::default() };
        assert_eq!(
            url("/s/{flow}/{template}", Provider::Twilio, parts),
            "wss://voice.example.com/ws/pod/voice-agent-0/s/v7/order-confirmation"
        );
        for bad in ["", "s", "/a?b", "/{other}", "/a/../b", "/a b", "/a#"] {
            assert!(bad.parse::<WsPath>().is_err(), "{bad}");
        }
    }
}
