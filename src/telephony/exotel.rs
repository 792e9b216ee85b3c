//! Exotel: `CallSid` in a query, a form or JSON, answered in JSON.

use serde_json::json;

use super::Document;

pub const CALL_FIELD: &str = "CallSid";

/// Names the agent's stream.
pub fn connect(ws_url: &str) -> Document {
    let body = json!({"url": ws_url}).to_string();
    Document { content_type: "application/json", body }
}
