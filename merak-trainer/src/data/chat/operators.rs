//! The code of a template as the engine takes it: `~` and `%`, which it has not for all values, as
//! calls of functions, and texts in quotes with the escapes that Python knows.

use std::fmt::Write as _;

/// The function that `~` becomes.
pub(super) const CONCAT: &str = "merak_concat";

/// The function that `%` becomes.
pub(super) const REM: &str = "merak_rem";

/// Words between expressions.
const KEYWORDS: [&str; 6] = ["and", "or", "not", "in", "if", "else"];

/// Operators of more than one character.
const LONG_OPERATORS: [&str; 6] = ["//", "**", "==", "!=", ">=", "<="];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Word,
    Open,
    Close,
    Operator,
}

/// A part of code, with what stands before it since the last one.
#[derive(Debug, Clone, Copy)]
struct Token<'a> {
    blank: &'a str,
    text: &'a str,
    kind: Kind,
}

/// The code of a tag: what stands between `{%` or `{{` and its end.
#[derive(Debug)]
pub(super) struct Code<'a> {
    tokens: Vec<Token<'a>>,
    /// What stands before the end.
    blank: &'a str,
    /// The bytes of the code.
    pub(super) len: usize,
}

impl<'a> Code<'a> {
    /// The code up to `end`, which is `%}` or `}}`; none where there is no end, or a character that
    /// no code has: the engine tells of these.
    pub(super) fn up_to(end: &str, source: &'a str) -> Option<Self> {
        let (mut tokens, mut depth, mut at) = (Vec::new(), 0_usize, 0);
        loop {
            let rest = source.get(at..)?;
            let text = rest.trim_start();
            let blank = &rest[..rest.len() - text.len()];
            at += blank.len();
            let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
            if depth == 0 && (text.starts_with(end) || unsigned.starts_with(end)) {
                let len = at;
                return Some(Self { tokens, blank, len });
            }
            let (len, kind) = token(text)?;
            match kind {
                Kind::Open => depth += 1,
                Kind::Close => depth = depth.checked_sub(1)?,
                _ => {}
            }
            let text = &text[..len];
            tokens.push(Token { blank, text, kind });
            at += len;
        }
    }

    /// Whether it is this word alone.
    pub(super) fn is(&self, word: &str) -> bool {
        matches!(self.tokens[..], [only] if only.text == word)
    }

    /// The code as the engine takes it. That of a block begins with the word of a statement.
    pub(super) fn rewritten(&self, is_block: bool) -> String {
        let mut calls = Calls {
            tokens: &self.tokens,
            begun: vec![Vec::new(); self.tokens.len()],
            texts: self.tokens.iter().map(written).collect(),
            levels: vec![Level::default()],
        };
        for number in usize::from(is_block)..self.tokens.len() {
            calls.read(number);
        }
        calls.end_of_expression();
        let mut out = String::new();
        for ((token, begun), text) in self.tokens.iter().zip(calls.begun).zip(calls.texts) {
            out.push_str(token.blank);
            // The last one has the first ones within.
            for function in begun.into_iter().rev() {
                out.push_str(function);
                out.push('(');
            }
            out.push_str(&text);
        }
        out + self.blank
    }
}

/// The length and the kind of the token that a text begins with.
fn token(text: &str) -> Option<(usize, Kind)> {
    let first = text.chars().next()?;
    let is_word = |c: char| c == '_' || c.is_alphanumeric();
    if let quote @ ('\'' | '"') = first {
        return Some((quoted(text, quote)?, Kind::Text));
    }
    if is_word(first) {
        let len = text.find(|c| !is_word(c)).unwrap_or(text.len());
        return Some((number(text, len), Kind::Word));
    }
    if LONG_OPERATORS.iter().any(|long| text.starts_with(long)) {
        return Some((2, Kind::Operator));
    }
    let kind = match first {
        '(' | '[' | '{' => Kind::Open,
        ')' | ']' | '}' => Kind::Close,
        '+' | '-' | '*' | '/' | '%' | '.' | ',' | ':' | '~' | '|' | '=' | '>' | '<' => {
            Kind::Operator
        }
        _ => return None,
    };
    Some((1, kind))
}

/// The length of a word of `len` bytes, with the sign and the digits after the `e` of a number.
fn number(text: &str, len: usize) -> usize {
    let (word, rest) = text.split_at(len);
    let digits = word.strip_suffix(['e', 'E']).unwrap_or_default();
    let is_number = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit() || b == b'_');
    let Some(power) = rest.strip_prefix(['+', '-']).filter(|_| is_number) else {
        return len;
    };
    match power.bytes().take_while(u8::is_ascii_digit).count() {
        0 => len,
        digits => len + 1 + digits,
    }
}

/// The length of a text in quotes.
fn quoted(text: &str, quote: char) -> Option<usize> {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            _ if c == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// A token as the engine reads it: Python knows other escapes.
fn written(token: &Token<'_>) -> String {
    if token.kind != Kind::Text {
        return token.text.to_owned();
    }
    let mut out = String::with_capacity(token.text.len());
    let mut rest = token.text;
    while let Some(at) = rest.find('\\') {
        let (before, escape) = rest.split_at(at);
        out.push_str(before);
        let escaped = escape[1..].chars().next();
        let mut len = 1 + escaped.map_or(0, char::len_utf8);
        match (escaped, code_point(escape)) {
            // A line that goes on.
            (Some('\n'), _) => {}
            (Some('/'), _) => out.push_str("\\\\/"),
            (Some('a'), _) => out.push_str("\\x07"),
            (Some('v'), _) => out.push_str("\\x0b"),
            (Some('U'), Some(c)) => {
                len = 10;
                if c.is_ascii() {
                    let _ = write!(out, "\\x{:02x}", u32::from(c));
                } else {
                    out.push(c);
                }
            }
            _ => out.push_str(&escape[..len]),
        }
        rest = &escape[len..];
    }
    out.push_str(rest);
    out
}

/// The character of `\U0001F600`.
fn code_point(escape: &str) -> Option<char> {
    let digits = escape.get(2..10)?;
    let is_hex = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = u32::from_str_radix(digits, 16).ok().filter(|_| is_hex)?;
    char::from_u32(number)
}

/// Code whose operators become calls. As in Jinja, `%` binds like `*`, and tighter than `~`, which
/// binds tighter than `+`.
struct Calls<'t> {
    tokens: &'t [Token<'t>],
    /// The functions whose calls begin before each token.
    begun: Vec<Vec<&'static str>>,
    /// Each token as the engine reads it, and the ends of the calls after it.
    texts: Vec<String>,
    /// The expressions that are read: one for each bracket that is open, and the outermost.
    levels: Vec<Level>,
}

/// What is known of an expression while it is read, in numbers of tokens.
#[derive(Debug, Default)]
struct Level {
    /// Where the first of the operands of `~` begins.
    concat: Option<usize>,
    /// Where the first of the operands of `*`, `/`, `//` and `%` begins.
    product: Option<usize>,
    /// The last token of an operand.
    last: usize,
    has_concat: bool,
    /// Whether the right operand of `%` is being read.
    in_rem: bool,
}

impl Calls<'_> {
    fn level(&mut self) -> &mut Level {
        if self.levels.is_empty() {
            self.levels.push(Level::default());
        }
        self.levels.last_mut().expect("one level is always there")
    }

    fn read(&mut self, number: usize) {
        let token = self.tokens[number];
        match (token.kind, token.text) {
            (Kind::Open, _) => {
                self.operand(number);
                self.levels.push(Level::default());
            }
            (Kind::Close, _) => {
                self.end_of_expression();
                self.levels.pop();
                self.operand(number);
            }
            (_, "~") => {
                self.end_of_factor();
                self.level().has_concat = true;
                self.level().product = None;
                ",".clone_into(&mut self.texts[number]);
            }
            (_, "*" | "/" | "//" | "%") if self.level().product.is_some() => {
                self.end_of_factor();
                if token.text == "%" {
                    self.begin_rem(number);
                }
            }
            _ if self.is_between(number) => self.end_of_expression(),
            _ => self.operand(number),
        }
    }

    fn operand(&mut self, number: usize) {
        let level = self.level();
        level.concat.get_or_insert(number);
        level.product.get_or_insert(number);
        level.last = number;
    }

    fn begin_rem(&mut self, number: usize) {
        let level = self.level();
        level.in_rem = true;
        let begin = level.product.unwrap_or(number);
        self.begun[begin].push(REM);
        ",".clone_into(&mut self.texts[number]);
    }

    /// After an operand of `*`, `/`, `//` or `%`.
    fn end_of_factor(&mut self) {
        let level = self.level();
        let last = level.last;
        if std::mem::take(&mut level.in_rem) {
            self.texts[last].push(')');
        }
    }

    /// After an operand of what binds less than `~`.
    fn end_of_expression(&mut self) {
        self.end_of_factor();
        let Level {
            concat,
            last,
            has_concat,
            ..
        } = std::mem::take(self.level());
        if let Some(begin) = concat.filter(|_| has_concat) {
            self.begun[begin].push(CONCAT);
            self.texts[last].push(')');
        }
    }

    /// Whether a token stands between expressions, or between operands of what binds less than `~`.
    fn is_between(&mut self, number: usize) -> bool {
        let text = self.tokens[number].text;
        let before = |back: usize| Some(self.tokens.get(number.checked_sub(back)?)?.text);
        // The names of attributes, filters and tests may be any word.
        let is_name = match before(1) {
            Some("." | "|" | "is") => true,
            Some("not") => before(2) == Some("is"),
            _ => false,
        };
        match self.tokens[number].kind {
            Kind::Word => !is_name && KEYWORDS.contains(&text),
            Kind::Operator if matches!(text, "+" | "-") => {
                let follows = self.tokens.get(number.wrapping_sub(1));
                let follows = follows.is_some_and(|token| token.kind != Kind::Operator);
                follows && self.level().product.is_some()
            }
            Kind::Operator => !matches!(text, "." | "|" | "*" | "**"),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(code: &str) -> String {
        let source = format!("{code}}}}}");
        let code = Code::up_to("}}", &source).unwrap();
        code.rewritten(false)
    }

    #[test]
    fn operators_bind_as_in_jinja() {
        for (code, expected) in [
            (" a ~ b ", " merak_concat(a , b) "),
            ("a~b~c", "merak_concat(a,b,c)"),
            ("a + b ~ c - d", "a + merak_concat(b , c) - d"),
            (
                "a ~ -b | f(c ~ d)",
                "merak_concat(a , -b | f(merak_concat(c , d)))",
            ),
            ("a % b % c", "merak_rem(merak_rem(a , b) , c)"),
            ("a * b % c / d", "merak_rem(a * b , c) / d"),
            ("a ~ b % c ~ d", "merak_concat(a , merak_rem(b , c) , d)"),
            ("a % b ~ c", "merak_concat(merak_rem(a , b) , c)"),
            (
                "(a, b)[0] % (c % d)",
                "merak_rem((a, b)[0] , (merak_rem(c , d)))",
            ),
            ("not a % 2 == 0 and b", "not merak_rem(a , 2) == 0 and b"),
            (
                "a ~ b if c is not in d else e ~ f",
                "merak_concat(a , b) if c is not in d else merak_concat(e , f)",
            ),
            ("a.if ~ b.not", "merak_concat(a.if , b.not)"),
            ("a is defined ~ b", "merak_concat(a is defined , b)"),
            (
                "{'a': b ~ 1e-5, 'c': 2 ** -d % 3}[x]",
                "{'a': merak_concat(b , 1e-5), 'c': merak_rem(2 ** -d , 3)}[x]",
            ),
            ("f(*a, b=c % d)", "f(*a, b=merak_rem(c , d))"),
            ("'%s ~ %d' % (a, b), c", "merak_rem('%s ~ %d' , (a, b)), c"),
        ] {
            assert_eq!(rewritten(code), expected);
        }
    }

    #[test]
    fn code_ends_where_no_bracket_is_open_and_no_text() {
        let end = |source: &str| Code::up_to("}}", source).map(|code| code.len);
        assert_eq!(end(" '}}' }}"), Some(6));
        assert_eq!(end("{'a': {}}}}"), Some(9));
        assert_eq!(end("a -}}"), Some(2));
        for none in ["a", "'a }}", "a ; b }}", ") }}", "(a }}"] {
            assert_eq!(end(none), None, "{none}");
        }
    }

    #[test]
    fn texts_keep_the_escapes_of_python() {
        // repr('\/') is '\\/' in Python, which takes the other ones as C does.
        assert_eq!(rewritten(r"'<\/a>\n\''"), r"'<\\/a>\n\''");
        assert_eq!(
            rewritten(r#""\a\v\U0001F600\U00000022\\/""#),
            r#""\x07\x0b😀\x22\\/""#
        );
        assert_eq!(rewritten("'a\\\nb'"), "'ab'");
    }
}
