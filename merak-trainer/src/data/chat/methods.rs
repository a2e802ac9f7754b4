//! Methods of Python's texts that templates call: those that `pycompat` lacks, or has with fewer
//! arguments.

use minijinja::{
    Error, ErrorKind, State,
    value::{Kwargs, Tuple, Value, from_args},
};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::printf;

/// Calls a method that a value does not have by itself.
pub(super) fn call(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let own = match value.as_str() {
        Some(text) => of_text(text, method, args)?,
        None => None,
    };
    match own {
        Some(result) => Ok(result),
        None => unknown_method_callback(state, value, method, args),
    }
}

/// The result of a method that stands here.
fn of_text(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "split" | "rsplit" => split(text, method == "rsplit", args)?,
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            text.strip_prefix(prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            text.strip_suffix(suffix).unwrap_or(text).into()
        }
        "format" => printf::str_format(text, args)?,
        "partition" | "rpartition" => partition(text, method == "rpartition", args)?,
        "find" | "rfind" => position(text, method == "rfind", args)?
            .unwrap_or(-1)
            .into(),
        "index" | "rindex" => {
            let found = position(text, method == "rindex", args)?;
            found.ok_or_else(|| wrong("substring not found"))?.into()
        }
        _ => return Ok(None),
    }))
}

fn wrong(reason: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// The parts of a text between separators, or between blanks; the rest stays whole after
/// `maxsplit` of them.
fn split(text: &str, from_right: bool, args: &[Value]) -> Result<Value, Error> {
    let (separator, most, named): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
    let named_separator = named.get::<Option<String>>("sep")?;
    let separator = separator.or(named_separator.as_deref());
    let most = most.or(named.get("maxsplit")?);
    named.assert_all_used()?;
    // A negative number is no limit.
    let most = most.and_then(|most| usize::try_from(most).ok());
    let most = most.map_or(usize::MAX, |most| most.saturating_add(1));
    let mut parts: Vec<_> = match separator {
        Some("") => return Err(wrong("empty separator")),
        Some(separator) if from_right => text.rsplitn(most, separator).collect(),
        Some(separator) => text.splitn(most, separator).collect(),
        None => words(text, from_right, most),
    };
    if from_right {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

/// The words of a text, of which the last one is all that is left.
fn words(text: &str, from_right: bool, most: usize) -> Vec<&str> {
    let trim = if from_right {
        str::trim_end
    } else {
        str::trim_start
    };
    let (mut words, mut rest) = (Vec::new(), trim(text));
    while !rest.is_empty() {
        let is_last = words.len() + 1 == most;
        let cut = if is_last {
            None
        } else if from_right {
            let cut = rest.trim_end_matches(|c: char| !c.is_whitespace()).len();
            (cut > 0).then(|| (&rest[cut..], &rest[..cut]))
        } else {
            rest.find(char::is_whitespace).map(|cut| rest.split_at(cut))
        };
        let (word, left) = cut.unwrap_or((rest, ""));
        words.push(word);
        rest = trim(left);
    }
    words
}

/// What stands before a separator, the separator, and what stands after it.
fn partition(text: &str, from_right: bool, args: &[Value]) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(args)?;
    if separator.is_empty() {
        return Err(wrong("empty separator"));
    }
    let found = if from_right {
        text.rsplit_once(separator)
    } else {
        text.split_once(separator)
    };
    let parts = match found {
        Some((before, after)) => [before, separator, after],
        None if from_right => ["", "", text],
        None => [text, "", ""],
    };
    Ok(Tuple::new(parts.map(Value::from).into()).into())
}

/// Where a text stands in another one, between two of its places, in characters.
fn position(text: &str, from_right: bool, args: &[Value]) -> Result<Option<i64>, Error> {
    let (what, begin, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
    let count = |text: &str| i64::try_from(text.chars().count()).unwrap_or(i64::MAX);
    let length = count(text);
    // A negative place counts from the end.
    let place = |at: i64| if at < 0 { (at + length).max(0) } else { at };
    let begin = begin.map_or(0, place);
    let end = end.map_or(length, place).min(length);
    if begin > end {
        return Ok(None);
    }
    let byte = |at: i64| {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        let found = text.char_indices().nth(at);
        found.map_or(text.len(), |(byte, _)| byte)
    };
    let piece = &text[byte(begin)..byte(end)];
    let found = if from_right {
        piece.rfind(what)
    } else {
        piece.find(what)
    };
    Ok(found.map(|at| begin + count(&piece[..at])))
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::super::{Chat, ChatTemplate};

    fn result(expression: &str) -> Result<String, String> {
        let source = format!("{{{{ {expression} }}}}");
        let template = ChatTemplate::new(&source, Map::new())?;
        template.render(&Chat::default(), 0, false)
    }

    #[test]
    fn methods_give_what_python_gives() {
        for (expression, expected) in [
            ("'a-b-c'.split('-', 1) | join('|')", "a|b-c"),
            ("'a-b-c'.split('-', maxsplit=1) | join('|')", "a|b-c"),
            ("'a-b-c'.split(sep='-') | join('|')", "a|b|c"),
            ("'a--b'.split('-', -1) | join('|')", "a||b"),
            ("'</think>x'.split('</think>')[-1]", "x"),
            ("'a-b-c'.rsplit('-', 1) | join('|')", "a-b|c"),
            ("'a-b-c'.rsplit('-') | join('|')", "a|b|c"),
            ("' a  b c '.split() | join('|')", "a|b|c"),
            ("' a  b c '.rsplit() | join('|')", "a|b|c"),
            ("' a  b c '.split(None, 1) | join('|')", "a|b c "),
            ("' a  b c '.rsplit(None, 1) | join('|')", " a  b|c"),
            ("' a b '.split(maxsplit=0) | join('|')", "a b "),
            ("' '.split() | length", "0"),
            ("'<a>b'.removeprefix('<a>')", "b"),
            ("'b'.removeprefix('<a>')", "b"),
            ("'b</a>'.removesuffix('</a>')", "b"),
            ("'b'.removesuffix('')", "b"),
            ("'k=v=w'.partition('=') | join('|')", "k|=|v=w"),
            ("'k'.partition('=') | join('|')", "k||"),
            ("'k=v=w'.rpartition('=') | join('|')", "k=v|=|w"),
            ("'k'.rpartition('=') | join('|')", "||k"),
            ("'größer'.find('e')", "4"),
            ("'abcabc'.find('a', 1)", "3"),
            ("'abcabc'.find('c', 0, 2)", "-1"),
            ("'abcabc'.rfind('b', -4)", "4"),
            ("'abcabc'.rfind('a', 0, -3)", "0"),
            ("'abc'.find('', 3)", "3"),
            ("'abc'.find('', 4)", "-1"),
            ("'abcabc'.index('c')", "2"),
            ("'abcabc'.rindex('a')", "3"),
            // Those of the library.
            ("'xxa'.lstrip('x').upper()", "A"),
        ] {
            assert_eq!(result(expression).as_deref(), Ok(expected), "{expression}");
        }
    }

    #[test]
    fn what_python_refuses_is_refused() {
        for (expression, reason) in [
            ("'a'.split('')", "empty separator"),
            ("'a'.partition('')", "empty separator"),
            ("'a'.index('b')", "substring not found"),
            ("'a'.split('-', count=1)", "count"),
            ("'a'.shout()", "unknown method"),
        ] {
            let refused = result(expression).unwrap_err();
            assert!(refused.contains(reason), "{expression}: {refused}");
        }
    }
}
