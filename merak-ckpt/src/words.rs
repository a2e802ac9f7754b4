//! How both commands print sizes, and names and values that come from outside.
//!
//! ```
//! use merak_ckpt::words::{Bytes, brief, message};
//! assert_eq!(Bytes(54_536_192).to_string(), "52.0 MiB");
//! assert_eq!(brief("a\u{1b}[31mb"), r"a\u{1b}[31mb");
//! assert_eq!(message("cannot read a\rb\n"), "cannot read a\\rb\n");
//! ```

use std::{borrow::Cow, fmt, path::Path};

/// A number of bytes, which prints with three digits and a binary unit: `512 B`, `1.50 MiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let (mut number, mut unit) = (self.0 as f64, 0);
        while number >= 999.5 && unit + 1 < UNITS.len() {
            number /= 1024.0;
            unit += 1;
        }
        let decimals = match number {
            _ if unit == 0 => 0,
            number if number < 9.995 => 2,
            number if number < 99.95 => 1,
            _ => 0,
        };
        f.pad(&format!("{number:.decimals$} {}", UNITS[unit]))
    }
}

impl From<usize> for Bytes {
    fn from(bytes: usize) -> Self {
        Self(bytes as u64)
    }
}

/// A size, and the limit that it exceeds. Where both print alike, the difference is told instead.
pub(crate) fn beyond(found: u64, limit: u64) -> String {
    let (shown, most) = (Bytes(found).to_string(), Bytes(limit).to_string());
    if shown == most {
        let more = Bytes(found.saturating_sub(limit));
        format!("{more} more than the limit of {most}")
    } else {
        format!("{shown}, the limit is {most}")
    }
}

/// The longest name or value that a message shows whole, in characters.
const LONGEST_VALUE: usize = 200;

/// The longest message that is shown whole, in characters.
const LONGEST_MESSAGE: usize = 1200;

/// A name or value in one line, as messages show it: what a terminal would act on is escaped, and a
/// long text keeps its beginning and end.
pub fn brief(text: &str) -> String {
    shortened(text, LONGEST_VALUE, |c| acts(c) || c == '\n')
}

/// A reason that quotes text from outside: as [`brief`], but longer.
pub fn sentence(text: &str) -> String {
    shortened(text, LONGEST_MESSAGE / 2, |c| acts(c) || c == '\n')
}

/// The name of a file or folder, as messages show it; one without a name in quotes.
pub fn file(path: &Path) -> String {
    if path.as_os_str().is_empty() {
        return "\"\"".to_owned();
    }
    sentence(&path.to_string_lossy())
}

/// A message on its way to the terminal: its lines stay, what a terminal would act on is escaped,
/// and a long one keeps its beginning and end, which name the key and say what to do.
pub fn message(text: &str) -> String {
    shortened(text, LONGEST_MESSAGE, acts)
}

/// A text on its way to the terminal, whole: what a terminal would act on is escaped, lines and
/// tabs stay.
pub fn plain(text: &str) -> Cow<'_, str> {
    let acts = |c| acts(c) && c != '\t';
    if text.contains(acts) {
        Cow::Owned(escaped(text, acts))
    } else {
        Cow::Borrowed(text)
    }
}

/// A text with its lines folded to this many columns. A line goes on as far to the right as it
/// begins, at least past the word that it begins with. A list without blanks that is longer than a
/// line is folded after its commas and colons.
///
/// ```
/// let text = merak_ckpt::words::folded("time      12.5 ms a step, predicted 11.9\n", Some(30));
/// assert_eq!(text, "time      12.5 ms a step,\n          predicted 11.9\n");
/// ```
pub fn folded(text: &str, columns: Option<usize>) -> String {
    const INDENT: usize = 10;
    let columns = columns.unwrap_or(usize::MAX);
    let mut folded = String::with_capacity(text.len());
    for line in text.lines() {
        let begin = line.chars().take_while(|c| *c == ' ').count();
        let indent = begin.max(INDENT);
        let mut used = 0;
        for word in line
            .split_inclusive(' ')
            .flat_map(|word| pieces(word, columns.saturating_sub(indent)))
        {
            let length = width(word.trim_end());
            if used > indent && used + length > columns {
                folded.truncate(folded.trim_end().len());
                folded.push('\n');
                folded.push_str(&" ".repeat(indent));
                used = indent;
            }
            folded.push_str(word);
            used += width(word);
        }
        folded.push('\n');
    }
    folded
}

/// The columns that a text takes. Sequences that set colours take none.
fn width(text: &str) -> usize {
    let mut is_within = false;
    let is_shown = |c: &char| {
        let starts = *c == '\u{1b}';
        let is_hidden = is_within || starts;
        is_within = starts || (is_within && !c.is_ascii_alphabetic());
        !is_hidden
    };
    text.chars().filter(is_shown).count()
}

/// The word, or the parts of a list that has no room.
fn pieces(word: &str, room: usize) -> Vec<&str> {
    if width(word) > room {
        word.split_inclusive([',', ':']).collect()
    } else {
        vec![word]
    }
}

/// A row of a table whose first two columns have these widths. Where the row exceeds `columns`, its
/// last cell gets a line of its own, below the second, or further to the left where there is
/// no room for it; so does the second cell, if it has no room beside the first.
///
/// ```
/// use merak_ckpt::words::row;
/// assert_eq!(row(["tp", "2", "a.toml:1"], [4, 3], Some(80)), "tp    2    a.toml:1");
/// assert_eq!(row(["tp", "2", "a.toml:1"], [4, 3], Some(14)), "tp    2\n      a.toml:1");
/// ```
pub fn row(cells: [&str; 3], widths: [usize; 2], columns: Option<usize>) -> String {
    let ([first, second, last], [one, two]) = (cells, widths);
    let row = format!("{first:one$}  {second:two$}  {last}");
    let Some(columns) = columns.filter(|columns| width(&row) > *columns) else {
        return row;
    };
    let below = |cell: &str| {
        let indent = columns.saturating_sub(width(cell)).min(one + 2);
        format!("\n{:indent$}{cell}", "")
    };
    let begin = format!("{first:one$}  {second}");
    if width(&begin) > columns {
        first.to_owned() + &below(second) + &below(last)
    } else {
        begin + &below(last)
    }
}

/// What to say about an option that begins with another dash than `-`, as text that was pasted may.
///
/// ```
/// let told = merak_ckpt::words::pasted_dash("\u{2014}tp");
/// assert_eq!(told.unwrap(), "\"\u{2014}tp\" begins with an em dash: write \"--tp\"");
/// assert_eq!(merak_ckpt::words::pasted_dash("--tp"), None);
/// ```
pub fn pasted_dash(word: &str) -> Option<String> {
    let is_other = |c: char| matches!(c, '\u{2010}'..='\u{2015}' | '\u{2212}');
    let name = word.trim_start_matches(|c| c == '-' || is_other(c));
    let dashes = &word[..word.len() - name.len()];
    let dash = match dashes.chars().find(|c| is_other(*c))? {
        '\u{2013}' => "an en dash",
        '\u{2014}' => "an em dash",
        _ => "another dash than `-`",
    };
    let (word, name) = (brief(word), brief(name));
    Some(format!("\"{word}\" begins with {dash}: write \"--{name}\""))
}

/// Whether a terminal would do something else than show the character: control characters, and
/// those that turn the direction of a text.
fn acts(c: char) -> bool {
    let turns =
        matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    turns || (c.is_control() && c != '\n')
}

fn escaped(text: &str, acts: impl Fn(char) -> bool) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if acts(c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// The text, escaped; if it is longer than `longest` characters, the first `longest / 2` and the
/// last `longest / 4` of them.
fn shortened(text: &str, longest: usize, acts: impl Fn(char) -> bool) -> String {
    let shown = escaped(text, acts);
    // A text has no more characters than bytes.
    let count = if shown.len() <= longest {
        0
    } else {
        shown.chars().count()
    };
    if count <= longest {
        return shown;
    }
    let (head, tail) = (longest / 2, longest / 4);
    let start: String = shown.chars().take(head).collect();
    let end: String = shown.chars().skip(count - tail).collect();
    format!(
        "{start} .. ({} characters left out) .. {end}",
        count - head - tail
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits_and_a_binary_unit() {
        let shown =
            [0, 512, 1000, 1536, 54_536_192, 1 << 30, u64::MAX].map(|n| Bytes(n).to_string());
        let expected = [
            "0 B", "512 B", "0.98 KiB", "1.50 KiB", "52.0 MiB", "1.00 GiB", "16.0 EiB",
        ];
        assert_eq!(shown, expected);
        assert_eq!(format!("{:>10}", Bytes(512)), "     512 B");
    }

    #[test]
    fn lines_and_lists_without_blanks_are_folded_to_the_columns() {
        let list = vec!["1.25"; 64].join(":");
        let indented = format!("{:20}{}", "", "word ".repeat(30).trim_end());
        let text = format!(
            "costs F={list},I=1\n{}\n{indented}\n",
            "word ".repeat(40).trim_end()
        );
        let short = folded(&text, Some(80));
        assert!(short.lines().all(|line| line.len() <= 80), "{short}");
        let joined: String = short.split_whitespace().collect();
        assert_eq!(joined, text.split_whitespace().collect::<String>());
        let last = short.lines().last().unwrap();
        assert!(last.starts_with(&format!("{:20}word", "")), "{short}");
        assert_eq!(folded(&text, None), text);
    }

    #[test]
    fn colours_take_no_columns_of_a_folded_line() {
        let plain = "2026-11-23 WARN merak_ckpt: a degree is odd and fits no layer\n";
        let coloured = plain.replace("WARN", "\u{1b}[33mWARN\u{1b}[0m");
        let folded = folded(&coloured, Some(40));
        let shown = folded.replace("\u{1b}[33m", "").replace("\u{1b}[0m", "");
        assert_eq!(shown, super::folded(plain, Some(40)));
        assert!(shown.lines().count() == 2 && folded != shown, "{folded}");
    }

    #[test]
    fn cells_of_a_row_stay_within_the_columns() {
        for columns in [24, 40, 60] {
            let cells = [
                "a_long_name_of_a_key",
                "a_value_of_20_letters",
                "environment MERAK_X",
            ];
            let row = row(cells, [20, 40], Some(columns));
            assert!(row.lines().all(|line| line.len() <= columns), "{row}");
            assert_eq!(row.split_whitespace().count(), 4, "{row}");
        }
    }

    #[test]
    fn nothing_that_a_terminal_acts_on_is_left() {
        let hostile = "a\u{1b}[2J\u{9b}31m\r\u{7}\u{8}\u{202e}b\u{7f}\tc\n";
        let shown = message(hostile);
        assert!(
            !shown.contains(|c: char| c.is_control() && c != '\n'),
            "{shown:?}"
        );
        assert!(!brief(hostile).contains(char::is_control));
        assert!(!file(Path::new(hostile)).contains(char::is_control));
        assert_eq!(plain("a\tb\u{1b}\n"), "a\tb\\u{1b}\n");
        assert_eq!(plain("öffnen"), "öffnen");
    }

    #[test]
    fn a_long_value_keeps_its_beginning_and_its_end() {
        assert_eq!(brief(&"x".repeat(200)), "x".repeat(200));
        let long = brief(&format!("begin{}end", "ö".repeat(20_000)));
        assert!(
            long.starts_with("beginö") && long.ends_with("öend"),
            "{long}"
        );
        assert!(
            long.contains(" .. (19858 characters left out) .. "),
            "{long}"
        );
        assert!(message(&"y".repeat(50_000)).len() < 1000);
        assert_eq!(file(Path::new("")), "\"\"");
        let sizes =
            [(3 << 20, 1 << 20), ((1 << 20) + 1, 1 << 20)].map(|(found, most)| beyond(found, most));
        assert_eq!(
            sizes,
            [
                "3.00 MiB, the limit is 1.00 MiB",
                "1 B more than the limit of 1.00 MiB"
            ]
        );
    }
}
