//! The text of a template as the engine takes it.

use super::operators::Code;

/// The filter that a `{% generation %}` block becomes.
pub(super) const FILTER: &str = "merak_generation";

/// A template for the engine.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) text: String,
    /// Whether the template says in `{% generation %}` blocks what a model is to learn.
    pub(super) has_generation: bool,
}

impl Source {
    /// A template as it stands in a file. Its lines end with LF, as Jinja2 makes them;
    /// `{% generation %}` blocks become filters, which treat blanks and names alike.
    pub(super) fn of(written: &str) -> Self {
        let written = written.replace("\r\n", "\n").replace('\r', "\n");
        let mut source = Self {
            text: String::with_capacity(written.len()),
            has_generation: false,
        };
        let mut rest = written.as_str();
        while let Some(begin) = rest.find('{') {
            let (before, tag) = rest.split_at(begin);
            source.text.push_str(before);
            let len = source.tag(tag);
            rest = &tag[len..];
        }
        source.text.push_str(rest);
        source
    }

    /// Adds a tag, a comment, a raw block or a brace, and returns its length. What has no end is
    /// left to the engine, which tells of it.
    fn tag(&mut self, tag: &str) -> usize {
        let end = match tag.get(..2) {
            Some("{#") => {
                let end = tag[2..].find("#}");
                return self.verbatim(tag, end.map_or(tag.len(), |end| end + 4));
            }
            Some("{%") => "%}",
            Some("{{") => "}}",
            _ => return self.verbatim(tag, 1),
        };
        let begin = if tag[2..].starts_with(['-', '+']) {
            3
        } else {
            2
        };
        let Some(code) = Code::up_to(end, &tag[begin..]) else {
            return self.verbatim(tag, tag.len());
        };
        let is_block = end == "%}";
        if is_block && code.is("raw") {
            return self.verbatim(tag, end_of_raw(tag, begin + code.len));
        }
        self.text.push_str(&tag[..begin]);
        let written = &tag[begin..begin + code.len];
        if is_block && code.is("generation") {
            self.has_generation = true;
            let filter = format!("filter {FILTER}");
            self.text.push_str(&written.replace("generation", &filter));
        } else if is_block && code.is("endgeneration") {
            self.text
                .push_str(&written.replace("endgeneration", "endfilter"));
        } else {
            self.text.push_str(&code.rewritten(is_block));
        }
        // The end has no code of its own, and is copied with what follows it.
        let sign = usize::from(!tag[begin + code.len..].starts_with(end));
        let len = begin + code.len + sign + end.len();
        self.text.push_str(&tag[begin + code.len..len]);
        len
    }

    fn verbatim(&mut self, text: &str, len: usize) -> usize {
        self.text.push_str(&text[..len]);
        len
    }
}

/// Where a raw block ends whose first tag ends after `from`.
fn end_of_raw(text: &str, from: usize) -> usize {
    for (at, _) in text[from..].match_indices("{%") {
        let inner = from + at + 2;
        let begin = inner + usize::from(text[inner..].starts_with(['-', '+']));
        if text[begin..].trim_start().starts_with("endraw")
            && let Some(code) = Code::up_to("%}", &text[begin..])
            && code.is("endraw")
        {
            return begin + code.len;
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_end_as_jinja_makes_them() {
        assert_eq!(Source::of("a\r\nb\rc\n\r\nd\r").text, "a\nb\nc\n\nd\n");
    }

    #[test]
    fn generation_blocks_are_tags_alone() {
        let source = Source::of("{%- generation +%}a{% endgeneration-%}");
        assert!(source.has_generation);
        let filtered = "{%- filter merak_generation +%}a{% endfilter-%}";
        assert_eq!(source.text, filtered);
        for text in [
            "{# {% generation %} #}",
            "{% raw %}{% generation %}{{ a ~ b }}{%- endraw -%}",
            "{{ '{% generation %}' }}{% set a = \"{% endgeneration %}\" %}",
            "{ % generation %}",
            "{{ a } {% generation %}",
            "{# {% generation %}",
            "{% raw %}{% generation %}",
            "{%",
            "{",
        ] {
            let source = Source::of(text);
            assert_eq!((source.text.as_str(), source.has_generation), (text, false));
        }
    }

    #[test]
    fn code_after_what_is_not_code_is_rewritten() {
        let text = "{# ' #}{% raw %}'{% endraw %}{%- if a % 2 -%}{{- a ~ b }}é";
        let expected =
            "{# ' #}{% raw %}'{% endraw %}{%- if merak_rem(a , 2) -%}{{- merak_concat(a , b) }}é";
        assert_eq!(Source::of(text).text, expected);
    }
}
