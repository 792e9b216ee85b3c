//! Which stream is for which call.

use std::collections::HashMap;

use fleet::names::CallSid;

/// The number of a stream.
pub(super) type StreamId = u64;

/// A new stream is given the call that has waited longest on its pod. That is a
/// guess, since a client need not say more; the stream's own `start` settles it.
#[derive(Debug, Default)]
pub(super) struct Streams {
    next: StreamId,
    calls: HashMap<StreamId, CallSid>,
    holders: HashMap<CallSid, Holder>,
}

#[derive(Debug, Clone, Copy)]
struct Holder {
    stream: StreamId,
    /// The stream has named the call itself.
    is_sure: bool,
}

impl Streams {
    /// Opens a stream for the first of `calls` that has none.
    pub(super) fn open(&mut self, calls: impl IntoIterator<Item = CallSid>) -> Option<StreamId> {
        let call = calls.into_iter().find(|call| !self.holders.contains_key(call))?;
        self.next += 1;
        self.hold(call, Holder { stream: self.next, is_sure: false });
        Some(self.next)
    }

    /// The stream says which call it is for. Whoever had only guessed that call
    /// takes the other's guess in return. A call that is not here, or that
    /// another stream has named before, leaves the stream without one.
    pub(super) fn name(&mut self, stream: StreamId, named: CallSid, is_here: bool) {
        let guess = self.close(stream);
        let holder = self.holders.get(&named).copied();
        match holder {
            _ if !is_here => {}
            Some(Holder { is_sure: true, .. }) => {}
            Some(other) => {
                self.hold(named, Holder { stream, is_sure: true });
                self.calls.remove(&other.stream);
                if let Some(guess) = guess {
                    self.hold(guess, other);
                }
            }
            None => self.hold(named, Holder { stream, is_sure: true }),
        }
    }

    /// The call a stream is for, as far as is known.
    pub(super) fn call(&self, stream: StreamId) -> Option<&CallSid> {
        self.calls.get(&stream)
    }

    /// Ends a stream; the call it was for.
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
    fn streams_take_the_calls_in_order_and_no_more_than_there_are() {
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
        streams.name(first, call("b"), true);
        assert_eq!(
            (streams.call(first), streams.call(second)),
            (Some(&call("b")), Some(&call("a")))
        );
        streams.name(second, call("a"), true);
        assert_eq!(
            (streams.close(first), streams.close(second)),
            (Some(call("b")), Some(call("a")))
        );
    }

    #[test]
    fn a_stream_for_another_call_holds_none_of_ours() {
        let mut streams = Streams::default();
        let (first, second) = (open(&mut streams).unwrap(), open(&mut streams).unwrap());
        streams.name(first, call("elsewhere"), false);
        assert_eq!(streams.close(first), None);
        streams.name(second, call("b"), true);
        let third = open(&mut streams).unwrap();
        streams.name(third, call("b"), true);
        assert_eq!((streams.close(third), streams.close(second)), (None, Some(call("b"))));
    }
}
