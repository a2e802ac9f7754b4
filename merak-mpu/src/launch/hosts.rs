//! SLURM's short forms of lists: hosts, and tasks on each of them.

use std::{fmt, iter, str::FromStr};

/// A list of hosts as SLURM writes it: `n[01-03,7],gpu1` are `n01`, `n02`, `n03`, `n7` and `gpu1`.
///
/// The list stays in its short form, so a range of a billion hosts takes no memory: hosts are made
/// one by one, as they are asked for.
///
/// ```
/// use merak_mpu::HostList;
/// let hosts: HostList = "n[01-03,7],gpu1".parse()?;
/// assert_eq!(hosts.first(), "n01");
/// assert_eq!(hosts.iter().collect::<Vec<_>>(), ["n01", "n02", "n03", "n7", "gpu1"]);
///
/// let hosts: HostList = "n[0-999999999]".parse()?;
/// assert_eq!((hosts.num_hosts(), hosts.host(123).unwrap()), (1_000_000_000, "n123".to_owned()));
///
/// let error = "n[3-1]".parse::<HostList>().unwrap_err();
/// assert_eq!(error.to_string(), "the range 3-1 ends before it begins");
/// # Ok::<(), merak_mpu::BadHostList>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostList(Vec<Name>);

/// Why a text is no list of hosts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct BadHostList {
    reason: String,
}

/// One entry of a list: the hosts with every combination of its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Name(Vec<Part>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Numbers(Vec<Range>),
}

/// Numbers from `first` to `last`, with zeros in front up to `width` digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    first: u64,
    last: u64,
    width: usize,
}

/// Longest number of a range, in digits, so that it fits a `u64` and its zeros stay few.
const MOST_DIGITS: usize = 18;

impl HostList {
    /// The host of the first entry.
    pub fn first(&self) -> String {
        // Every list has an entry, and every entry a host.
        self.host(0).unwrap_or_default()
    }

    /// The number of hosts, as far as a `u64` counts.
    pub fn num_hosts(&self) -> u64 {
        let names = self.0.iter().map(Name::num_hosts);
        names.fold(0, u64::saturating_add)
    }

    /// The host at an index of the list.
    pub fn host(&self, mut index: u64) -> Option<String> {
        for name in &self.0 {
            let num_hosts = name.num_hosts();
            if index < num_hosts {
                return Some(name.host(index));
            }
            index -= num_hosts;
        }
        None
    }

    /// All hosts in the order of the list.
    pub fn iter(&self) -> impl Iterator<Item = String> {
        let names = self.0.iter();
        names.flat_map(|name| (0..name.num_hosts()).map(|index| name.host(index)))
    }
}

impl Name {
    fn num_hosts(&self) -> u64 {
        let parts = self.0.iter().map(Part::num_texts);
        parts.fold(1, u64::saturating_mul)
    }

    /// The host with this number; the last part counts fastest.
    fn host(&self, mut index: u64) -> String {
        let mut texts = Vec::with_capacity(self.0.len());
        for part in self.0.iter().rev() {
            let num_texts = part.num_texts();
            texts.push(part.text(index % num_texts));
            index /= num_texts;
        }
        texts.into_iter().rev().collect()
    }
}

impl Part {
    fn num_texts(&self) -> u64 {
        match self {
            Self::Text(_) => 1,
            Self::Numbers(ranges) => {
                let counts = ranges.iter().map(Range::num_numbers);
                counts.fold(0, u64::saturating_add)
            }
        }
    }

    fn text(&self, mut index: u64) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Numbers(ranges) => {
                for Range { first, last, width } in ranges {
                    if index <= last - first {
                        return format!("{:0width$}", first + index);
                    }
                    index -= last - first + 1;
                }
                unreachable!("the index is below the number of texts")
            }
        }
    }
}

impl Range {
    fn num_numbers(&self) -> u64 {
        self.last - self.first + 1
    }
}

impl FromStr for HostList {
    type Err = BadHostList;

    fn from_str(text: &str) -> Result<Self, BadHostList> {
        let names = entries(text)?.into_iter().map(name);
        names.collect::<Result<_, _>>().map(Self)
    }
}

/// The texts between the commas outside of brackets.
fn entries(text: &str) -> Result<Vec<&str>, BadHostList> {
    let (mut entries, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, c) in text.char_indices() {
        match c {
            '[' if inside => return bad("a bracket stands inside another"),
            ']' if !inside => return bad("a bracket is closed that was not opened"),
            '[' | ']' => inside = c == '[',
            ',' if !inside => {
                entries.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return bad("a bracket is not closed");
    }
    entries.push(&text[start..]);
    Ok(entries)
}

fn name(entry: &str) -> Result<Name, BadHostList> {
    let mut parts = Vec::new();
    let mut rest = entry;
    while let Some((before, after)) = rest.split_once('[') {
        let (numbers, after) = after.split_once(']').expect("brackets are closed");
        parts.extend(letters(before)?);
        let ranges = numbers.split(',').map(range);
        parts.push(Part::Numbers(ranges.collect::<Result<_, _>>()?));
        rest = after;
    }
    parts.extend(letters(rest)?);
    if parts.is_empty() {
        return bad("a host has no name");
    }
    Ok(Name(parts))
}

fn letters(text: &str) -> Result<Option<Part>, BadHostList> {
    let is_legal = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    match text.chars().find(|&c| !is_legal(c)) {
        Some(c) => bad(format_args!("the name of a host has the character {c:?}")),
        None if text.is_empty() => Ok(None),
        None => Ok(Some(Part::Text(text.to_owned()))),
    }
}

fn range(text: &str) -> Result<Range, BadHostList> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = Range {
        first: digits(first)?,
        last: digits(last)?,
        width: first.len(),
    };
    if range.last < range.first {
        return bad(format_args!("the range {text} ends before it begins"));
    }
    Ok(range)
}

fn digits(text: &str) -> Result<u64, BadHostList> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok();
    match number.filter(|_| is_number && text.len() <= MOST_DIGITS) {
        Some(number) => Ok(number),
        None => bad("brackets hold numbers and ranges of numbers such as 01-03,7"),
    }
}

fn bad<T>(reason: impl fmt::Display) -> Result<T, BadHostList> {
    let reason = reason.to_string();
    Err(BadHostList { reason })
}

/// Tasks on each node as SLURM writes them: `4(x2),3` are 4, 4 and 3. Every number is at least 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TaskList(Vec<(usize, usize)>);

impl TaskList {
    /// None where the whole text is no such list.
    pub(super) fn read(text: &str) -> Option<Self> {
        let number = |text: &str| digits(text).ok().filter(|&number| number > 0);
        let entry = |entry: &str| {
            let (tasks, nodes) = match entry.split_once("(x") {
                Some((tasks, nodes)) => (tasks, number(nodes.strip_suffix(')')?)?),
                None => (entry, 1),
            };
            Some((number(tasks)?.try_into().ok()?, nodes.try_into().ok()?))
        };
        let entries = text.trim().split(',').map(entry);
        entries.collect::<Option<_>>().map(Self)
    }

    /// The tasks on the node with this number; none where the list has no such node.
    pub(super) fn on(&self, mut node: usize) -> Option<usize> {
        for &(tasks, nodes) in &self.0 {
            if node < nodes {
                return Some(tasks);
            }
            node -= nodes;
        }
        None
    }
}

impl fmt::Display for HostList {
    /// The short form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let commas = || iter::once("").chain(iter::repeat(","));
        for (comma, name) in commas().zip(&self.0) {
            f.write_str(comma)?;
            for part in &name.0 {
                match part {
                    Part::Text(text) => f.write_str(text)?,
                    Part::Numbers(ranges) => {
                        f.write_str("[")?;
                        for (comma, Range { first, last, width }) in commas().zip(ranges) {
                            write!(f, "{comma}{first:0width$}")?;
                            if last > first {
                                write!(f, "-{last:0width$}")?;
                            }
                        }
                        f.write_str("]")?;
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};

    fn hosts(list: &str) -> Vec<String> {
        list.parse::<HostList>().unwrap().iter().collect()
    }

    #[test]
    fn every_combination_of_several_brackets_is_a_host() {
        assert_eq!(
            hosts("r[1-2]n[09-10]-ib,x"),
            ["r1n09-ib", "r1n10-ib", "r2n09-ib", "r2n10-ib", "x"]
        );
        assert_eq!(hosts("[8-11]"), ["8", "9", "10", "11"]);
    }

    #[test]
    fn a_list_of_more_hosts_than_can_be_counted_takes_no_memory() {
        let bomb = "n[0-999999999999999999]".repeat(4);
        let list: HostList = bomb.parse().unwrap();
        assert_eq!(list.num_hosts(), u64::MAX);
        assert_eq!(list.first(), "n0n0n0n0");
    }

    #[test]
    fn what_is_no_list_of_hosts_is_refused_with_the_reason() {
        for (text, reason) in [
            ("", "a host has no name"),
            ("a,,b", "a host has no name"),
            ("n[", "a bracket is not closed"),
            ("n]", "a bracket is closed that was not opened"),
            ("n[[1]]", "a bracket stands inside another"),
            (
                "n[]",
                "brackets hold numbers and ranges of numbers such as 01-03,7",
            ),
            (
                "n[1-]",
                "brackets hold numbers and ranges of numbers such as 01-03,7",
            ),
            (
                "n[+1]",
                "brackets hold numbers and ranges of numbers such as 01-03,7",
            ),
            (
                "n[0000000000000000001]",
                "brackets hold numbers and ranges of numbers such as 01-03,7",
            ),
            ("n[9-8]", "the range 9-8 ends before it begins"),
            ("a b", "the name of a host has the character ' '"),
        ] {
            let error = text.parse::<HostList>().unwrap_err();
            assert_eq!(error.to_string(), reason, "{text}");
        }
    }

    #[test]
    fn tasks_of_a_node_are_found_in_the_short_form() {
        let tasks = TaskList::read("4(x2),3").unwrap();
        let on = |node| tasks.on(node);
        assert_eq!([0, 1, 2, 3].map(on), [Some(4), Some(4), Some(3), None]);
        let many = TaskList::read("1(x999999999999999999),2").unwrap();
        assert_eq!(many.on(7), Some(1));
        for text in [
            "",
            "x",
            "0",
            "-1",
            "+1",
            "4(x",
            "4(xa)",
            "2(x0)",
            "2(x3",
            "4(x2)3",
            "4,,",
            "4,x",
            "4(x99999999999999999999)",
        ] {
            assert_eq!(TaskList::read(text), None, "{text}");
        }
    }

    fn part() -> impl Strategy<Value = Part> {
        let range = (0_u64..20, 0_u64..4, 1_usize..4).prop_map(|(first, more, zeros)| Range {
            first,
            last: first + more,
            // Numbers are never cut, and the last one is as wide as the short form tells.
            width: zeros.max(first.to_string().len()),
        });
        prop_oneof![
            "[a-z.-]{1,3}".prop_map(Part::Text),
            vec(range, 1..3).prop_map(Part::Numbers),
        ]
    }

    /// The same hosts by nested loops over all texts.
    fn expanded(list: &HostList) -> Vec<String> {
        let texts = |part: &Part| match part {
            Part::Text(text) => vec![text.clone()],
            Part::Numbers(ranges) => ranges
                .iter()
                .flat_map(|&Range { first, last, width }| {
                    (first..=last).map(move |number| format!("{number:0width$}"))
                })
                .collect(),
        };
        let names = list.0.iter().flat_map(|Name(parts)| {
            parts.iter().fold(vec![String::new()], |begun, part| {
                let texts = texts(part);
                let longer = |begin: &String| -> Vec<String> {
                    texts.iter().map(|text| format!("{begin}{text}")).collect()
                };
                begun.iter().flat_map(longer).collect()
            })
        });
        names.collect()
    }

    proptest! {
        #[test]
        fn the_short_form_names_the_hosts_that_were_written(names in vec(vec(part(), 1..4), 1..4)) {
            let written = HostList(names.into_iter().map(Name).collect());
            let read: HostList = written.to_string().parse().unwrap();
            let all: Vec<_> = read.iter().collect();
            prop_assert_eq!(&all, &expanded(&written));
            prop_assert_eq!(read.num_hosts(), all.len() as u64);
            prop_assert_eq!(read.first(), &all[0][..]);
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in "[n0-9,\\[\\]\\-é ]{0,20}") {
            if let Ok(list) = text.parse::<HostList>() {
                prop_assert!(!list.first().is_empty());
                prop_assert_eq!(list.host(list.num_hosts()), None);
            }
        }

        #[test]
        fn no_text_makes_the_reader_of_tasks_panic(text in "[0-9x(),é ]{0,20}") {
            if let Some(tasks) = TaskList::read(&text) {
                prop_assert!(tasks.on(0).is_some_and(|tasks| tasks > 0));
            }
        }
    }
}
