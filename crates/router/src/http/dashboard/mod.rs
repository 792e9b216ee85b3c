//! The dashboard at `/`. Its files are embedded in the program.

use axum::{
    extract::Path,
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};

use super::{
    ApiError,
    openapi::{Endpoint, Group, schemas},
};

/// Permits only same-origin scripts, styles and requests; no inline code, no framing.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";

macro_rules! files {
    ($($name:literal)*) => {
        [$(($name, include_str!(concat!("assets/", $name)))),*]
    };
}

const FILES: [(&str, &str); 17] = files! {
    "access.js" "actions.js" "api.js" "calls.js" "capacity.js" "charts.js" "confirm.js" "detail.js" "dom.js"
    "edit.js" "feed.js" "format.js" "page.css" "page.js" "pods.js" "pools.js" "time.js"
};

pub(super) fn index_endpoint() -> Endpoint {
    let example = "<!doctype html>…".into();
    Endpoint::new(Group::Router, "Dashboard").responds_untyped(HTML, schemas::text(), example)
}

pub(super) fn file_endpoint() -> Endpoint {
    let names = FILES.map(|(name, _)| name);
    Endpoint::new(Group::Router, "File of the dashboard")
        .path_param("name", schemas::one_of(&names), names[0])
        .responds_untyped("text/javascript", schemas::text(), "export …".into())
        .or_content("text/css", schemas::text(), "body { … }".into())
        .error(404, "The file is unknown.")
}

pub(super) async fn index() -> Response {
    response(HTML, include_str!("assets/index.html"))
}

pub(super) async fn file(Path(name): Path<String>) -> Response {
    let Some((name, text)) = FILES.iter().find(|(known, _)| *known == name) else {
        let error = format!("no such path: /page/{name}");
        return ApiError::new(StatusCode::NOT_FOUND, error).into_response();
    };
    let content_type = if name.ends_with(".css") { "text/css" } else { "text/javascript" };
    response(content_type, text)
}

fn response(content_type: &'static str, text: &'static str) -> Response {
    let headers: [(HeaderName, &'static str); 6] = [
        (header::CONTENT_TYPE, content_type),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        // Another version of the router serves other files.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    let mut response = text.into_response();
    for (name, value) in headers {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use fleet::{EndCause, EventKind};

    #[test]
    fn every_event_and_end_cause_has_a_text() {
        let format = include_str!("assets/format.js");
        for kind in EventKind::ALL {
            let entry = format!("\n  {}: [", kind.as_str());
            assert!(format.contains(&entry), "{} has no sentence", kind.as_str());
        }
        for cause in EndCause::ALL {
            let entry = format!("\n  {}: \"", cause.as_str());
            assert!(format.contains(&entry), "{} has no text", cause.as_str());
        }
    }

    #[test]
    fn every_asset_is_served() {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/src/http/dashboard/assets");
        let mut files: Vec<String> = std::fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != "index.html")
            .collect();
        files.sort();
        assert_eq!(files, FILES.map(|(name, _)| name.to_owned()));
    }
}
