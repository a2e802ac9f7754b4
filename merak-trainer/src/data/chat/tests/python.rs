//! Templates beside `apply_chat_template` of transformers 5.24 with Jinja2 3.1.6 and Python 3.11,
//! which wrote the texts here.

use serde_json::{Map, json};

use super::super::{Chat, ChatTemplate};

/// The text of a template that knows some values.
fn rendered(template: &str) -> Result<String, String> {
    let kwargs = json!({
        "a": [1, 2], "b": {"k": "v"}, "tiny": 1.5e-07, "huge": 1e22,
        "l": [1.5e-07, 1e22, {"x": 1e16}], "s": "it's", "n": null,
    });
    let chat = Chat {
        kwargs: kwargs.as_object().cloned().unwrap_or_default(),
        ..Chat::default()
    };
    ChatTemplate::new(template, Map::new())?.render(&chat, 0, false)
}

#[test]
fn values_print_as_in_python() {
    for (template, expected) in [
        ("{{ l }}", "[1.5e-07, 1e+22, {'x': 1e+16}]"),
        ("{{ l | string }}", "[1.5e-07, 1e+22, {'x': 1e+16}]"),
        (
            "{{ '' ~ l ~ tiny }}",
            "[1.5e-07, 1e+22, {'x': 1e+16}]1.5e-07",
        ),
        (
            "{{ tiny ~ ' ' ~ huge ~ ' ' ~ n ~ true ~ 0.1 }}",
            "1.5e-07 1e+22 NoneTrue0.1",
        ),
        (
            "{{ 1e15 ~ ' ' ~ 123456789012345680.0 }}",
            "1000000000000000.0 1.2345678901234568e+17",
        ),
        ("{{ l | join(' ') }}", "1.5e-07 1e+22 {'x': 1e+16}"),
        ("{{ [b, b] | join('-', attribute='k') }}", "v-v"),
        ("{{ [{'f': {'n': [7]}}] | join('-', 'f.n.0') }}", "7"),
        ("{{ 'ab' | join(',') }}", "a,b"),
        ("{{ nothing | join(',') }}", ""),
        (
            "{{ ['\x7f\u{200b}\u{2028}\u{a0}\u{ad}\u{e000}'] }}",
            "['\\x7f\\u200b\\u2028\\xa0\\xad\\ue000']",
        ),
        ("{{ ['é模😀\u{301}'] }}", "['é模😀\u{301}']"),
        (
            "{{ [\"it's\", 'a\"b', \"'\\\"\", '\\n\\t\\\\\\0'] }}",
            "[\"it's\", 'a\"b', '\\'\"', '\\n\\t\\\\\\x00']",
        ),
        (
            "{{ ['\u{378}', '\u{d7fc}', '\u{3000}'] }}",
            "['\\u0378', '\\ud7fc', '\\u3000']",
        ),
        (
            "{{ {'a': none, 1: true, 2.0: (1,)} }}",
            "{'a': None, 1: True, 2.0: (1,)}",
        ),
        ("{{ [(), (1, 2), [], {}] }}", "[(), (1, 2), [], {}]"),
        ("{{ [nothing, tiny][1:] }}", "[1.5e-07]"),
        ("{{ [nothing] }}", "[Undefined]"),
        (
            "{{ -0.0 }} {{ 5e-324 }} {{ 1e-4 }} {{ 9e15 }} {{ 1e16 }}",
            "-0.0 5e-324 0.0001 9000000000000000.0 1e+16",
        ),
        (
            "{{ 1e400 }} {{ -1e400 }} {{ 1e400 - 1e400 }}",
            "inf -inf nan",
        ),
        ("{{ a ~ b }}", "[1, 2]{'k': 'v'}"),
        ("{{ nothing ~ 'x' }}", "x"),
        ("{{ tiny | string | length }}", "7"),
    ] {
        assert_eq!(rendered(template).as_deref(), Ok(expected), "{template}");
    }
}

#[test]
fn tojson_takes_its_options_in_the_order_of_transformers() {
    for (template, expected) in [
        ("{{ 'é' | tojson(4) }}", "\"\\u00e9\""),
        (
            "{{ {'é': [1]} | tojson(true, 2) }}",
            "{\n  \"\\u00e9\": [\n    1\n  ]\n}",
        ),
        (
            "{{ {'é': [1]} | tojson(false, 2) }}",
            "{\n  \"é\": [\n    1\n  ]\n}",
        ),
        ("{{ [1, 2] | tojson(0, none, [';', '=']) }}", "[1;2]"),
        (
            "{{ {'b': 1, 'a': 2} | tojson(0, none, none, true) }}",
            "{\"a\": 2, \"b\": 1}",
        ),
        (
            "{{ {'b': 1, 'a': 2} | tojson(indent=none, sort_keys=1) }}",
            "{\"a\": 2, \"b\": 1}",
        ),
        ("{{ [1] | tojson(indent=4) }}", "[\n    1\n]"),
        ("{{ [1] | tojson(separators=none, indent=none) }}", "[1]"),
        ("{{ [tiny, huge] | tojson }}", "[1.5e-07, 1e+22]"),
    ] {
        assert_eq!(rendered(template).as_deref(), Ok(expected), "{template}");
    }
}

#[test]
fn texts_in_quotes_have_the_escapes_of_python() {
    for (template, expected) in [
        ("{{ '<\\/a>' }}", "<\\/a>"),
        ("{{ '\\a\\v\\b\\f' }}", "\x07\x0b\x08\x0c"),
        ("{{ '\\U0001F600\\x41\\101\\u00e9' }}", "😀AAé"),
        ("{{ 'a\\\nb' }}", "ab"),
        ("{{ '\\q\\d' }}", "\\q\\d"),
    ] {
        assert_eq!(rendered(template).as_deref(), Ok(expected), "{template}");
    }
}

#[test]
fn lines_end_as_in_jinja() {
    for (template, expected) in [
        ("a\r\nb\rc\n\r\nd\r", "a\nb\nc\n\nd"),
        ("{%- if true %}\r\n  x\r\n{% endif %}\r\ny", "  x\ny"),
        ("{{ 'a\r\nb\rc' }}", "a\nb\nc"),
    ] {
        assert_eq!(rendered(template).as_deref(), Ok(expected), "{template}");
    }
}

#[test]
fn texts_are_filled_with_values_as_in_python() {
    for (template, expected) in [
        ("{{ '%05.2f' % 3.14159 }}", "03.14"),
        ("{{ '%s' % s }}", "it's"),
        ("{{ '%d items' % 3 }}", "3 items"),
        ("{{ '%s %s' % ('a', 1.0) }}", "a 1.0"),
        ("{{ '%s' % a }}", "[1, 2]"),
        ("{{ '%s' % (a,) }}", "[1, 2]"),
        ("{{ '%s %s' % (tiny, b) }}", "1.5e-07 {'k': 'v'}"),
        ("{{ '%r' % s }}", "\"it's\""),
        ("{{ '%r' % (s,) }}", "\"it's\""),
        ("{{ '%(k)s!' % b }}", "v!"),
        (
            "{{ '%5s|%-5s|%.2s' % ('é', 'é', 'éàü') }}",
            "    é|é    |éà",
        ),
        ("{{ '%d %i %u' % (3.99, -2.5, true) }}", "3 -2 1"),
        ("{{ '100%%' % () }}", "100%"),
        ("{{ '%%' % b }}", "%"),
        ("{{ '%s' % b }}", "{'k': 'v'}"),
        ("{{ 'x' % a }}", "x"),
        (
            "{{ '%x %X %o %+d % d' % (255, 255, 8, 5, 5) }}",
            "ff FF 10 +5  5",
        ),
        (
            "{{ '%e %g %c %c' % (12345.678, 0.00001, 'x', 65) }}",
            "1.234568e+04 1e-05 x A",
        ),
        ("{{ '%s' % nothing }}", ""),
        ("{{ '%s' % n }}", "None"),
        (
            "{{ '%.f|%5.1f|%-8.3f|' % (2.5, 2.25, 1.0) }}",
            "2|  2.2|1.000   |",
        ),
        (
            "{{ 7 % 3 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 7.5 % 2 }} {{ -7.5 % 2 }}",
            "1 2 -2 1.5 0.5",
        ),
        (
            "{{ 10 * 7 % 4 }} {{ 3 + 10 % 4 * 2 }} {{ 20 % 7 % 4 }}",
            "2 7 2",
        ),
        ("{{ 2 ** 3 % 5 }} {{ -7 % 3 ~ 'x' }}", "3 2x"),
        ("{{ '%s' % 'a' ~ '%s' % 'b' }}", "ab"),
        ("{% set x = '%s' % s %}{{ x }}", "it's"),
        ("{% if '%d' % 3 == '3' %}y{% endif %}", "y"),
        ("{{ ('%s' % 1) | length }}", "1"),
    ] {
        assert_eq!(rendered(template).as_deref(), Ok(expected), "{template}");
    }
}

#[test]
fn the_filter_of_formats_and_their_flags_are_those_of_python() {
    for (template, expected) in [
        ("{{ '%s-%s' | format(1, tiny) }}", "1-1.5e-07"),
        ("{{ '%(x)s' | format(x=a) }}", "[1, 2]"),
        ("{{ '%s' | format(a) }}", "[1, 2]"),
        ("{{ '%5s' | format('é') }}", "    é"),
        ("{{ '%03d|%-4d|' | format(7, 7) }}", "007|7   |"),
        ("{{ '%#x' % 255 }}", "0xff"),
        ("{{ '%.0f%%' % 99.6 }}", "100%"),
        ("{{ '%s%s' % ('a', 'b') * 2 }}", "abab"),
        ("{{ '%+s|% s|%05s' % ('a', 'b', 'c') }}", "a|b|    c"),
        ("{{ '%5c|%-5c|' % ('a','b') }}", "    a|b    |"),
        ("{{ '%05d|%+05d|% 05d' % (-3, 3, 3) }}", "-0003|+0003| 0003"),
    ] {
        assert_eq!(rendered(template).as_deref(), Ok(expected), "{template}");
    }
}

#[test]
fn what_python_refuses_to_fill_is_refused() {
    for (template, reason) in [
        (
            "{{ 'x' % 1 }}",
            "not all arguments converted during string formatting",
        ),
        (
            "{{ '%s' % (1, 2) }}",
            "not all arguments converted during string formatting",
        ),
        (
            "{{ 'x' | format(1) }}",
            "not all arguments converted during string formatting",
        ),
        (
            "{{ '%s %s' % 1 }}",
            "not enough arguments for format string",
        ),
        (
            "{{ '%s' | format }}",
            "not enough arguments for format string",
        ),
        ("{{ '%(k)s' % 1 }}", "format requires a mapping"),
        ("{{ '%' % 1 }}", "incomplete format"),
        ("{{ '%(k' % b }}", "incomplete format key"),
        ("{{ '%d' % 'a' }}", "cannot be formatted"),
        ("{{ '%d' % n }}", "cannot be formatted"),
        ("{{ '%y' % 1 }}", "invalid conversion type 'y'"),
        ("{{ '%.3d' % 5 }}", "a whole number with a precision"),
        (
            "\n{{ 1 % 0 }}",
            "in line 2: invalid operation: unable to calculate 1 % 0",
        ),
        (
            "{{ a % 2 }}",
            "% operator on unsupported types sequence and number",
        ),
        ("{{ [1] | tojson(1, 2, 3, 4, 5) }}", "too many arguments"),
    ] {
        let refused = rendered(template).unwrap_err();
        assert!(refused.contains(reason), "{template}: {refused}");
    }
}

#[test]
fn widths_without_bound_are_refused_instead_of_taking_all_memory() {
    for template in [
        "{{ '{:>99999999999}'.format(1) }}",
        "{{ '{:.99999999999f}'.format(1.5) }}",
        "{{ '{:>9999999}{{}}{:>9999999}'.format(1, 2) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '%.999999999f' % 1.5 }}",
        "{{ '%9999999s%9999999s' % (1, 2) }}",
        "{{ '%99999999999999999999999s' % 1 }}",
    ] {
        let refused = rendered(template).unwrap_err();
        let reason = "characters, more than 16777216";
        assert!(refused.contains(reason), "{template}: {refused}");
    }
    assert_eq!(
        rendered("{{ '{:>99999}'.format(1) | length }}").as_deref(),
        Ok("99999")
    );
    assert_eq!(
        rendered("{{ '99999999999 {}'.format(1) }}").as_deref(),
        Ok("99999999999 1")
    );
}

#[test]
fn lists_that_grow_without_bound_are_refused() {
    let growing = |again: &str, times: usize| {
        format!(
            "{{% set ns = namespace(x=['0123456789']) %}}{{% for i in range({times}) %}}\
             {{% set ns.x = {again} %}}{{% endfor %}}{{{{ ns.x }}}}"
        )
    };
    let wide = rendered(&growing("[ns.x, ns.x]", 40)).unwrap_err();
    assert!(
        wide.contains("a value takes more than 67108864 bytes as a text"),
        "{wide}"
    );
    let deep = rendered(&growing("[ns.x]", 500)).unwrap_err();
    assert!(
        deep.contains("more than 200 lists within each other"),
        "{deep}"
    );
}

#[test]
fn generation_in_texts_comments_and_raw_blocks_marks_no_answer() {
    for (template, expected) in [
        ("{{ '{% generation %}' }}", "{% generation %}"),
        ("{# {% generation %} #}a", "a"),
        ("{% raw %}{% generation %}{% endraw %}", "{% generation %}"),
    ] {
        assert_eq!(rendered(template).as_deref(), Ok(expected));
        let template = ChatTemplate::new(template, Map::new()).unwrap();
        assert!(
            template
                .answered(&Chat::default())
                .unwrap()
                .answers
                .is_empty()
        );
    }
    let marked = "{{ '{% generation %}' }}{% generation %}a{% endgeneration %}";
    let template = ChatTemplate::new(marked, Map::new()).unwrap();
    let answered = template.answered(&Chat::default()).unwrap();
    assert_eq!(answered.text, "{% generation %}a");
    assert_eq!(answered.answers.len(), 1);
    assert_eq!(&answered.text[answered.answers[0].clone()], "a");
}
