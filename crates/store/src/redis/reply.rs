//! Replies of Redis functions: a status word, the time of Redis, and the fields of that status.

use std::str::FromStr;

use redis::Value;

use crate::StoreError;
use fleet::{
    AttachedStream, CallLookup, CallStatus, EndCause, EndedCall, Millis, PodCall, PodFacts,
    PodStatus, SkipReason, SkippedStep, WaitingCall, names::PodName,
};

/// A reply, read from left to right.
#[derive(Debug)]
pub(super) struct FunctionReply {
    pub word: String,
    pub time: Millis,
    rest: std::vec::IntoIter<Value>,
}

impl FunctionReply {
    pub(super) fn new(value: Value) -> Result<Self, StoreError> {
        let mut rest = list_of(value)?.into_iter();
        let word = text_of(rest.next())?;
        let time = number_of(rest.next())?;
        Ok(Self { word, time, rest })
    }

    pub(super) fn text(&mut self) -> Result<String, StoreError> {
        text_of(self.rest.next())
    }

    /// A text that is omitted if it and everything after it is empty.
    pub(super) fn text_if_any(&mut self) -> Result<String, StoreError> {
        self.rest.next().map_or(Ok(String::new()), |value| text_of(Some(value)))
    }

    pub(super) fn number(&mut self) -> Result<u64, StoreError> {
        number_of(self.rest.next())
    }

    pub(super) fn flag(&mut self) -> Result<bool, StoreError> {
        Ok(self.number()? == 1)
    }

    /// A name or pool, validated like any external text.
    pub(super) fn parse<T: FromStr>(&mut self) -> Result<T, StoreError> {
        parse(&self.text()?)
    }

    /// A name; `None` if the text is empty or omitted.
    pub(super) fn parse_some<T: FromStr>(&mut self) -> Result<Option<T>, StoreError> {
        parse_some(&self.text_if_any()?)
    }

    pub(super) fn list(&mut self) -> Result<Vec<Value>, StoreError> {
        list_of(self.rest.next().ok_or_else(malformed)?)
    }

    pub(super) fn texts(&mut self) -> Result<Vec<String>, StoreError> {
        self.list()?.into_iter().map(|value| text_of(Some(value))).collect()
    }

    pub(super) fn names<T: FromStr>(&mut self) -> Result<Vec<T>, StoreError> {
        self.texts()?.iter().map(|text| parse(text)).collect()
    }

    pub(super) fn tried(&mut self) -> Result<Vec<SkippedStep>, StoreError> {
        tried(&self.text_if_any()?)
    }

    /// Calls that ended on `pod`: id, source pool, duration.
    pub(super) fn ended_on(&mut self, pod: &PodName) -> Result<Vec<EndedCall>, StoreError> {
        let texts = self.texts()?;
        let read =
            |row: &[String]| ended(&row[0], pod.clone(), &row[1], &row[2], EndCause::PodGone);
        texts.chunks_exact(3).map(read).collect()
    }

    /// Calls that ended, each with its pod and cause.
    pub(super) fn ended(&mut self) -> Result<Vec<EndedCall>, StoreError> {
        let texts = self.texts()?;
        let read = |row: &[String]| {
            // A cause that only a manual edit can have written counts as an expired lease.
            let cause = row[4].parse().unwrap_or(EndCause::Lease);
            ended(&row[0], parse(&row[1])?, &row[2], &row[3], cause)
        };
        texts.chunks_exact(5).map(read).collect()
    }
}

fn ended(
    call: &str,
    pod: PodName,
    pool: &str,
    lasted: &str,
    cause: EndCause,
) -> Result<EndedCall, StoreError> {
    let (source_pool, lasted) = (parse(pool)?, parse(lasted)?);
    Ok(EndedCall { call: parse(call)?, pod, source_pool, lasted, cause })
}

/// `gold=at_capacity standard=empty`
fn tried(text: &str) -> Result<Vec<SkippedStep>, StoreError> {
    let read = |part: &str| {
        let (step, reason) = part.split_once('=').ok_or_else(malformed)?;
        let reason = match reason {
            "empty" => SkipReason::Empty,
            "all_draining" => SkipReason::AllDraining,
            "at_capacity" => SkipReason::AtCapacity,
            "unknown" => SkipReason::Unknown,
            "held" => SkipReason::Held,
            _ => return Err(malformed()),
        };
        Ok(SkippedStep { step: parse(step)?, reason })
    };
    text.split_whitespace().map(read).collect()
}

fn parse_some<T: FromStr>(text: &str) -> Result<Option<T>, StoreError> {
    if text.is_empty() { Ok(None) } else { parse(text).map(Some) }
}

/// Parses a call in the format of the Lua function `call_row`.
pub(super) fn call_row(value: Value) -> Result<CallLookup, StoreError> {
    let mut row = list_of(value)?.into_iter();
    let mut text = || text_of(row.next());
    let (call, pod) = (parse(&text()?)?, text()?);
    if pod.is_empty() {
        return Ok(CallLookup::Waiting(WaitingCall {
            call,
            merchant: parse_some(&text()?)?,
            since: parse(&text()?)?,
            until: parse(&text()?)?,
            poll_by: parse(&text()?)?,
            tried: tried(&text()?)?,
        }));
    }
    let (source_pool, merchant) = (parse(&text()?)?, parse_some(&text()?)?);
    let (allocated_at, lease_until) = (parse(&text()?)?, millis(&text()?)?);
    let (tried, stage) = (tried(&text()?)?, text()?);
    Ok(CallLookup::Live(CallStatus {
        call,
        pod: parse(&pod)?,
        source_pool,
        merchant,
        allocated_at,
        lease_until,
        tried,
        provisional: stage == "provisional" || stage == "unattached",
        is_handed: stage == "handed",
        pod_attempt: parse(&text()?)?,
        stream: attached_stream(&text()?),
    }))
}

/// Parses the stream of a call: gateway, stream, start, and the cause of a release. `None` for a
/// malformed one, which counts as none.
fn attached_stream(text: &str) -> Option<AttachedStream> {
    let mut parts = text.split(' ');
    Some(AttachedStream {
        gateway: parts.next()?.parse().ok()?,
        stream: parts.next()?.parse().ok()?,
        since: parts.next()?.parse().ok()?,
        ending: parts.next()?.parse().ok(),
    })
}

/// Parses a pod in the format of the Lua function `pod_row`.
pub(super) fn pod_row(value: Value) -> Result<PodStatus, StoreError> {
    let mut row = list_of(value)?.into_iter();
    let mut text = || text_of(row.next());
    let (name, tier): (PodName, String) = (parse(&text()?)?, text()?);
    let facts = PodFacts {
        uid: text()?,
        address: text()?,
        ready: text()? == "1",
        terminating: text()? == "1",
        at_risk: text()? == "1",
        restarts: parse(&text()?)?,
        pin: Some(text()?).filter(|pin| !pin.is_empty()).map(|pin| parse(&pin)).transpose()?,
    };
    let (draining, quarantined) = (text()?, text()?);
    let calls = list_of(row.next().ok_or_else(malformed)?)?;
    let calls: Vec<String> =
        calls.into_iter().map(|value| text_of(Some(value))).collect::<Result<_, _>>()?;
    let mut calls: Vec<PodCall> = calls
        .chunks_exact(3)
        .map(|row| {
            let (allocated_at, lease_until) = (parse(&row[1])?, millis(&row[2])?);
            Ok(PodCall { call: parse(&row[0])?, allocated_at, lease_until })
        })
        .collect::<Result<_, StoreError>>()?;
    calls.sort_by(|a, b| (b.lease_until, &b.call).cmp(&(a.lease_until, &a.call)));
    let is_surplus = text_of(row.next())? == "1";
    Ok(PodStatus {
        name,
        facts,
        pool: Some(tier).filter(|tier| !tier.is_empty()).map(|tier| parse(&tier)).transpose()?,
        draining_until: some_millis(&draining)?,
        is_surplus,
        quarantined_until: some_millis(&quarantined)?,
        calls,
    })
}

/// Parses a score of a sorted set, which Redis may format as a float.
pub(super) fn millis(text: &str) -> Result<Millis, StoreError> {
    parse::<f64>(text).map(|millis| millis as Millis)
}

fn some_millis(text: &str) -> Result<Option<Millis>, StoreError> {
    Some(text).filter(|text| !text.is_empty()).map(millis).transpose()
}

pub(super) fn parse<T: FromStr>(text: &str) -> Result<T, StoreError> {
    text.parse()
        .map_err(|_| StoreError::Failed(format!("the store contains the invalid value {text:?}")))
}

fn malformed() -> StoreError {
    StoreError::Failed("the store sent a malformed reply".into())
}

fn list_of(value: Value) -> Result<Vec<Value>, StoreError> {
    match value {
        Value::Array(values) => Ok(values),
        _ => Err(malformed()),
    }
}

fn text_of(value: Option<Value>) -> Result<String, StoreError> {
    match value {
        Some(Value::BulkString(bytes)) => String::from_utf8(bytes).map_err(|_| malformed()),
        Some(Value::SimpleString(text)) => Ok(text),
        Some(Value::Int(number)) => Ok(number.to_string()),
        _ => Err(malformed()),
    }
}

fn number_of(value: Option<Value>) -> Result<u64, StoreError> {
    match value {
        Some(Value::Int(number)) => u64::try_from(number).map_err(|_| malformed()),
        other => parse(&text_of(other)?),
    }
}
