//! What stands behind the question mark: known names with values that make sense.

use std::str::FromStr;

use axum::{extract::FromRequestParts, http::request::Parts};
use data_encoding::BASE64URL_NOPAD;

use crate::http::ApiError;
use telephony::Params;

/// The parameters of a request.
pub struct Query(Params);

impl<S: Send + Sync> FromRequestParts<S> for Query {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let text = parts.uri.query().unwrap_or_default();
        Params::from_form(text).map(Self).map_err(|error| ApiError::bad_request(error.to_string()))
    }
}

impl Query {
    /// Refuses parameters that nobody reads: a misspelt filter must not show everything.
    pub fn only(&self, known: &[&str]) -> Result<(), ApiError> {
        match self.0.iter().find(|(name, _)| !known.contains(name)) {
            None => Ok(()),
            Some((name, _)) => Err(ApiError::bad_request(format!(
                "there is no parameter {name:?}; there are {}",
                known.join(", ")
            ))),
        }
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.get(name).is_some()
    }

    /// A value, unless it is empty.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).filter(|text| !text.is_empty())
    }

    pub fn parse<T: FromStr>(&self, name: &str, expected: &str) -> Result<Option<T>, ApiError> {
        self.text(name).map(|text| read(name, text, expected)).transpose()
    }

    /// How many rows are asked for.
    pub fn limit(&self, usual: usize, most: usize) -> Result<usize, ApiError> {
        let expected = format!("a number from 1 to {most}");
        // An empty text is no number.
        let limit = self.0.get("limit").map(|text| read("limit", text, &expected));
        let limit = limit.transpose()?.unwrap_or(usual);
        if (1..=most).contains(&limit) {
            Ok(limit)
        } else {
            Err(ApiError::bad_request(format!("limit={limit}: expected {expected}")))
        }
    }

    pub fn flag(&self, name: &str) -> Result<bool, ApiError> {
        match self.0.get(name) {
            None | Some("false") => Ok(false),
            Some("true" | "") => Ok(true),
            Some(_) => Err(ApiError::bad_request(format!("{name}: expected true or false"))),
        }
    }

    /// Where a page goes on: what [`cursor`] made for the same filters.
    pub fn cursor(&self, filters: &[&str]) -> Result<Option<String>, ApiError> {
        let Some(text) = self.text("cursor") else { return Ok(None) };
        let wrong = || ApiError::bad_request("cursor: not one that this router gave out");
        let bytes = BASE64URL_NOPAD.decode(text.as_bytes()).map_err(|_| wrong())?;
        let text = String::from_utf8(bytes).map_err(|_| wrong())?;
        let (mark, rest) = text.split_once(' ').ok_or_else(wrong)?;
        if mark == self.mark(filters) {
            Ok(Some(rest.to_owned()))
        } else {
            Err(ApiError::bad_request("the cursor belongs to another query; begin without one"))
        }
    }

    /// Where the next page of the same query begins.
    pub fn next(&self, filters: &[&str], place: &str) -> String {
        BASE64URL_NOPAD.encode(format!("{} {place}", self.mark(filters)).as_bytes())
    }

    /// Tells one query from another.
    fn mark(&self, filters: &[&str]) -> String {
        let values: Vec<&str> = filters.iter().map(|name| self.text(name).unwrap_or("")).collect();
        format!("{:08x}", crc32fast::hash(values.join("&").as_bytes()))
    }
}

fn read<T: FromStr>(name: &str, text: &str, expected: &str) -> Result<T, ApiError> {
    text.parse().map_err(|_| {
        let shown: String = text.chars().take(80).collect();
        ApiError::bad_request(format!("{name}={shown}: expected {expected}"))
    })
}
