//! The page at `/`: its files are part of the program.

use axum::{
    extract::Path,
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};

use super::{
    ApiError,
    openapi::{Endpoint, Group, schemas},
};

/// Nothing from elsewhere, nothing inline, in nobody's frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";

macro_rules! files {
    ($($name:literal)*) => {
        [$(($name, include_str!(concat!("assets/", $name)))),*]
    };
}

const FILES: [(&str, &str); 16] = files! {
    "access.js" "actions.js" "calls.js" "charts.js" "confirm.js" "dom.js" "edit.js" "feed.js"
    "net.js" "page.css" "page.js" "pods.js" "pools.js" "story.js" "time.js" "words.js"
};

pub(super) fn index_described() -> Endpoint {
    let example = "<!doctype html>…".into();
    Endpoint::new(Group::Router, "The page").gives_some(HTML, schemas::text(), example)
}

pub(super) fn part_described() -> Endpoint {
    let names = FILES.map(|(name, _)| name);
    Endpoint::new(Group::Router, "A part of the page")
        .path("name", schemas::one_of(&names), names[0])
        .gives_some("text/javascript", schemas::text(), "export …".into())
        .or_gives("text/css", schemas::text(), "body { … }".into())
        .fails(404, "The page has no such part.")
}

pub(super) async fn index() -> Response {
    file(HTML, include_str!("assets/index.html"))
}

pub(super) async fn part(Path(name): Path<String>) -> Response {
    let Some((name, text)) = FILES.iter().find(|(known, _)| *known == name) else {
        let error = format!("there is nothing at /page/{name}");
        return ApiError::new(StatusCode::NOT_FOUND, error).into_response();
    };
    let kind = if name.ends_with(".css") { "text/css" } else { "text/javascript" };
    file(kind, text)
}

fn file(kind: &'static str, text: &'static str) -> Response {
    let headers: [(HeaderName, &'static str); 6] = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        // Another version of the router has another page.
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

    #[test]
    fn every_file_of_the_page_is_served() {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/src/http/dashboard/assets");
        let mut there: Vec<String> = std::fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != "index.html")
            .collect();
        there.sort();
        assert_eq!(there, FILES.map(|(name, _)| name.to_owned()));
    }
}
