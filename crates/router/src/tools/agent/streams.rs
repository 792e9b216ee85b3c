//! Assignment of streams to calls.

use std::collections::HashMap;

use fleet::names::CallSid;

/// The number of a stream.
pub(super) type StreamId = u64;

/// A new stream gets the oldest call of its pod without a stream. That is a guess until a frame of
/// the stream names its call.
#[derive(Debug, Default)]
pub(super) struct Streams {
    next: StreamId,
    calls: HashMap<StreamId, CallSid>,
    holders: HashMap<CallSid, Holder>,
}

#[derive(Debug, Clone, Copy)]
struct Holder {
    stream: StreamId,
    /// A frame of the stream named the call.
    is_confirmed: bool,
}

impl Streams {
    /// Opens a stream for the first of `calls` that has none.
    pub(super) fn open(&mut self, calls: impl IntoIterator<Item = CallSid>) -> Option<StreamId> {
        let call = calls.into_iter().find(|call| !self.holders.contains_key(call))?;
        self.next += 1;
        self.hold(call, Holder { stream: self.next, is_confirmed: false });
        Some(self.next)
    }

    /// Assigns the call that the stream named. A stream that had this call by a guess gets the
    /// other's guess in return. A call on another pod, or one that another stream named before,
    /// leaves the stream without a call.
    pub(super) fn assign(&mut self, stream: StreamId, named: CallSid, is_on_pod: bool) {
        let guess = self.close(stream);
        let holder = self.holders.get(&named).copied();
        match holder {
            _ if !is_on_pod => {}
            Some(Holder { is_confirmed: true, .. }) => {}
            Some(other) => {
                self.hold(named, Holder { stream, is_confirmed: true });
                self.calls.remove(&other.stream);
                if let Some(guess) = guess {
                    self.hold(guess, other);
                }
            }
            None => self.hold(named, Holder { stream, is_confirmed: true }),
        }
    }

    /// Returns the call of a stream, confirmed or guessed.
    pub(super) fn call(&self, stream: StreamId) -> Option<&CallSid> {
        self.calls.get(&stream)
    }

    /// Ends a stream; returns its call.
    pub(super) fn close(&mut self, stream: StreamId) -> Option<CallSid> {
        let call = self.calls.remove(&stream)?;
        self.holders.remove(&call);
        Some(call)
    }

    fn hold(&mut self, call: CallSid, holder: Holder) {
        self.calls.insert(holder.stream, call.clone());
        self.holders.insert(call, holder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(name: &str) -> CallSid {
        name.parse().unwrap()
    }

    fn open(streams: &mut Streams) -> Option<StreamId> {
        streams.open([call("a"), call("b")])
    }

    #[test]
    fn streams_get_calls_in_order_until_none_is_left() {
        let mut streams = Streams::default();
        let (first, second) = (open(&mut streams).unwrap(), open(&mut streams).unwrap());
        assert_eq!(open(&mut streams), None);
        assert_eq!(
            (streams.call(first), streams.call(second)),
            (Some(&call("a")), Some(&call("b")))
        );
        assert_eq!(streams.close(first), Some(call("a")));
        assert_eq!(
            open(&mut streams).and_then(|third| streams.call(third).cloned()),
            Some(call("a"))
        );
    }

    #[test]
    fn two_wrong_guesses_are_swapped() {
        let mut streams = Streams::default();
        let (first, second) = (open(&mut streams).unwrap(), open(&mut streams).unwrap());
        streams.assign(first, call("b"), true);
        assert_eq!(
            (streams.call(first), streams.call(second)),
            (Some(&call("b")), Some(&call("a")))
        );
        streams.assign(second, call("a"), true);
        assert_eq!(
            (streams.close(first), streams.close(second)),
            (Some(call("b")), Some(call("a")))
        );
    }

    #[test]
    fn a_stream_of_a_call_on_another_pod_gets_no_call() {
        let mut streams = Streams::default();
        let (first, second) = (open(&mut streams).unwrap(), open(&mut streams).unwrap());
        streams.assign(first, call("elsewhere"), false);
        assert_eq!(streams.close(first), None);
        streams.assign(second, call("b"), true);
        let third = open(&mut streams).unwrap();
        streams.assign(third, call("b"), true);
        assert_eq!((streams.close(third), streams.close(second)), (None, Some(call("b"))));
    }
}
