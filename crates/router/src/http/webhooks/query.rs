//! Query parameters: known names with valid values, and page cursors.

use std::str::FromStr;

use axum::{extract::FromRequestParts, http::request::Parts};
use data_encoding::BASE64URL_NOPAD;

use crate::http::ApiError;
use telephony::Params;

/// The parameters of a request.
pub(crate) struct Query(Params);

impl<S: Send + Sync> FromRequestParts<S> for Query {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let text = parts.uri.query().unwrap_or_default();
        Params::from_form(text).map(Self).map_err(|error| ApiError::bad_request(error.to_string()))
    }
}

impl Query {
    /// Rejects unknown parameters: a misspelt filter must not return everything.
    pub(crate) fn only(&self, known: &[&str]) -> Result<(), ApiError> {
        match self.0.iter().find(|(name, _)| !known.contains(name)) {
            None => Ok(()),
            Some((name, _)) => Err(ApiError::bad_request(format!(
                "unknown parameter {name:?}; expected one of {}",
                known.join(", ")
            ))),
        }
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.get(name).is_some()
    }

    /// A non-empty value.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).filter(|text| !text.is_empty())
    }

    pub(crate) fn parse<T: FromStr>(
        &self,
        name: &str,
        expected: &str,
    ) -> Result<Option<T>, ApiError> {
        self.text(name).map(|text| parse(name, text, expected)).transpose()
    }

    /// Page size.
    pub(crate) fn limit(&self, default: usize, max: usize) -> Result<usize, ApiError> {
        let expected = format!("a number from 1 to {max}");
        // An empty limit is an error, not the default.
        let limit = self.0.get("limit").map(|text| parse("limit", text, &expected));
        let limit = limit.transpose()?.unwrap_or(default);
        if (1..=max).contains(&limit) {
            Ok(limit)
        } else {
            Err(ApiError::bad_request(format!("limit={limit}: expected {expected}")))
        }
    }

    pub(crate) fn flag(&self, name: &str) -> Result<bool, ApiError> {
        match self.0.get(name) {
            None | Some("false") => Ok(false),
            Some("true" | "") => Ok(true),
            Some(_) => Err(ApiError::bad_request(format!("{name}: expected true or false"))),
        }
    }

    /// Position of the page, from a cursor that [`Self::next`] made for the same filters.
    pub(crate) fn cursor(&self, filters: &[&str]) -> Result<Option<String>, ApiError> {
        let Some(text) = self.text("cursor") else { return Ok(None) };
        let invalid = || ApiError::bad_request("cursor: expected `next` of a previous page");
        let bytes = BASE64URL_NOPAD.decode(text.as_bytes()).map_err(|_| invalid())?;
        let text = String::from_utf8(bytes).map_err(|_| invalid())?;
        let (checksum, position) = text.split_once(' ').ok_or_else(invalid)?;
        if checksum == self.checksum(filters) {
            Ok(Some(position.to_owned()))
        } else {
            Err(ApiError::bad_request("the cursor belongs to other filters; omit it"))
        }
    }

    /// Cursor of the next page with the same filters.
    pub(crate) fn next(&self, filters: &[&str], position: &str) -> String {
        BASE64URL_NOPAD.encode(format!("{} {position}", self.checksum(filters)).as_bytes())
    }

    fn checksum(&self, filters: &[&str]) -> String {
        let values: Vec<&str> = filters.iter().map(|name| self.text(name).unwrap_or("")).collect();
        format!("{:08x}", crc32fast::hash(values.join("&").as_bytes()))
    }
}

fn parse<T: FromStr>(name: &str, text: &str, expected: &str) -> Result<T, ApiError> {
    text.parse().map_err(|_| {
        let shown: String = text.chars().take(80).collect();
        ApiError::bad_request(format!("{name}={shown}: expected {expected}"))
    })
}
