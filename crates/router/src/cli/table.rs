//! Text tables.

/// Formats rows under their titles, with columns as wide as their widest cell.
pub(super) fn table(titles: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([titles[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..titles.len()).map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded: Vec<String> =
            cells.zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        format!("{}\n", padded.join("  ").trim_end())
    };
    let mut text = line(&mut titles.iter().copied());
    for row in rows {
        text += &line(&mut row.iter().map(String::as_str));
    }
    text
}

/// Formats a duration in its largest unit: `42s`, `7m`, `3h`.
pub(super) fn short_duration(seconds: i64) -> String {
    match seconds {
        ..0 => "0s".into(),
        0..120 => format!("{seconds}s"),
        120..7_200 => format!("{}m", seconds / 60),
        _ => format!("{}h", seconds / 3_600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [vec!["gold".into(), "1".into()], vec!["b".into(), "1000".into()]];
        assert_eq!(table(&["POOL", "N"], &rows), "POOL  N\ngold  1\nb     1000\n");
    }
}
