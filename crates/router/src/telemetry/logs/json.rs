//! Log lines in JSON: one flat object each.

use std::fmt::{self, Debug, Write};

use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    fmt::{
        FmtContext, FormatEvent, FormatFields,
        format::Writer,
        time::{FormatTime, SystemTime},
    },
    registry::LookupSpan,
};

pub(super) struct Json;

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        writer.write_str(r#"{"timestamp":""#)?;
        SystemTime.format_time(&mut writer)?;
        write!(writer, r#"","level":"{}""#, event.metadata().level())?;
        let mut fields = Fields { writer, outcome: Ok(()) };
        event.record(&mut fields);
        fields.outcome?;
        fields.writer.write_str("}\n")
    }
}

struct Fields<'a> {
    writer: Writer<'a>,
    outcome: fmt::Result,
}

impl Fields<'_> {
    fn field(&mut self, field: &Field, value: impl FnOnce(&mut Writer<'_>) -> fmt::Result) {
        let writer = &mut self.writer;
        let write = || {
            writer.write_str(",\"")?;
            writer.write_str(field.name())?;
            writer.write_str("\":")?;
            value(writer)
        };
        if self.outcome.is_ok() {
            self.outcome = write();
        }
    }
}

impl Visit for Fields<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.field(field, |writer| {
            writer.write_char('"')?;
            Escaped(writer).write_str(value)?;
            writer.write_char('"')
        });
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.field(field, |writer| {
            writer.write_char('"')?;
            write!(Escaped(writer), "{value:?}")?;
            writer.write_char('"')
        });
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.field(field, |writer| write!(writer, "{value}"));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.field(field, |writer| write!(writer, "{value}"));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.field(field, |writer| {
            // JSON has no others.
            if value.is_finite() { write!(writer, "{value}") } else { writer.write_str("null") }
        });
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.field(field, |writer| write!(writer, "{value}"));
    }
}

/// Writes text as it stands between the quotes of a JSON string.
struct Escaped<'a, 'b>(&'a mut Writer<'b>);

impl Write for Escaped<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut plain = 0;
        for (at, byte) in text.bytes().enumerate() {
            if byte != b'"' && byte != b'\\' && byte >= b' ' {
                continue;
            }
            self.0.write_str(&text[plain..at])?;
            match byte {
                b'\n' => self.0.write_str("\\n")?,
                b'"' | b'\\' => write!(self.0, "\\{}", char::from(byte))?,
                _ => write!(self.0, "\\u{byte:04x}")?,
            }
            plain = at + 1;
        }
        self.0.write_str(&text[plain..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_said_is_json_and_says_it() {
        let mut line = String::new();
        for text in ["plain", "\"quoted\" \\ and \n\t\r\u{0}\u{1f}", "é 語 😀", ""] {
            line.clear();
            let mut writer = Writer::new(&mut line);
            write!(Escaped(&mut writer), "{text}").unwrap();
            let quoted = format!("\"{line}\"");
            assert_eq!(serde_json::from_str::<String>(&quoted).unwrap(), text);
        }
    }
}
