//! Detects whether a stream takes escape sequences and colours.

use std::{env, ffi::OsStr, io::IsTerminal};

/// Whether a stream is a terminal that supports escape sequences.
pub(crate) fn takes_escapes(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && is_capable(env::var_os("TERM").as_deref())
}

/// Whether a stream may be coloured; respects <https://no-color.org>.
pub(crate) fn takes_colours(stream: &impl IsTerminal) -> bool {
    takes_escapes(stream) && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

fn is_capable(term: Option<&OsStr>) -> bool {
    term.is_some_and(|term| !term.is_empty() && term != "dumb")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dumb_terminal_gets_plain_text() {
        for (term, capable) in
            [(None, false), (Some(""), false), (Some("dumb"), false), (Some("xterm"), true)]
        {
            assert_eq!(is_capable(term.map(OsStr::new)), capable, "{term:?}");
        }
    }
}
