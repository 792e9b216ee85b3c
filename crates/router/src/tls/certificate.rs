//! When a certificate ends: all that is needed of one here.

/// When a certificate (DER) ends, in seconds since 1970; `None` if it can't be read.
pub(crate) fn ends_at(der: &[u8]) -> Option<u64> {
    let certificate = Values(der).next()?.1;
    let signed = Values(certificate).next()?.1;
    // Before the time of its life stand its version, where there is one, its number, how it
    // is signed, and by whom.
    let before = if Values(signed).next()?.0 == VERSION { 4 } else { 3 };
    let life = Values(signed).nth(before)?.1;
    let (kind, end) = Values(life).nth(1)?;
    let text = std::str::from_utf8(end).ok()?.strip_suffix('Z')?;
    match kind {
        // Two digits of a year are those from 1950 to 2049.
        SHORT_TIME if text.get(..2)? < "50" => seconds(&format!("20{text}")),
        SHORT_TIME => seconds(&format!("19{text}")),
        LONG_TIME => seconds(text),
        _ => None,
    }
}

const VERSION: u8 = 0xa0;
const SHORT_TIME: u8 = 0x17;
const LONG_TIME: u8 = 0x18;

/// The values of which DER consists: the kind of each, and what is in it.
struct Values<'a>(&'a [u8]);

impl<'a> Iterator for Values<'a> {
    type Item = (u8, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (&kind, rest) = self.0.split_first()?;
        let (&first, rest) = rest.split_first()?;
        let (length, rest) = match first {
            short @ ..0x80 => (usize::from(short), rest),
            long => {
                let (digits, rest) = rest.split_at_checked(usize::from(long & 0x7f))?;
                let digits = digits.iter().filter(|_| digits.len() <= 4);
                (digits.fold(0, |sum, digit| sum << 8 | usize::from(*digit)), rest)
            }
        };
        let (value, rest) = rest.split_at_checked(length)?;
        self.0 = rest;
        Some((kind, value))
    }
}

/// `20261116093000` in seconds since 1970.
fn seconds(text: &str) -> Option<u64> {
    let part = |from: usize, to: usize| text.get(from..to)?.parse::<u64>().ok();
    let (year, month, day) = (part(0, 4)?, part(4, 6)?, part(6, 8)?);
    let time = part(8, 10)? * 3_600 + part(10, 12)? * 60 + part(12, 14)?;
    // Years begin in March here, so that a leap day is the last of one.
    let (year, month) =
        if month > 2 { (year, month - 3) } else { (year.checked_sub(1)?, month + 9) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day;
    // Until the first of January 1970, counted in the same way.
    (days.checked_sub(719_469)? * 86_400).checked_add(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_counted_from_1970() {
        assert_eq!(seconds("19700101000000"), Some(0));
        assert_eq!(seconds("20000229120000"), Some(951_825_600));
        assert_eq!(seconds("20261116093000"), Some(1_794_821_400));
        assert_eq!(seconds("1970"), None);
        assert_eq!(seconds("00000101000000"), None);
    }

    #[test]
    fn what_is_no_certificate_ends_never() {
        for bad in [&[][..], &[0x30], &[0x30, 0x84, 1, 1, 1, 1], &[0x30, 3, 0x30, 1, 2], b"text"] {
            assert_eq!(ends_at(bad), None, "{bad:?}");
        }
    }
}
