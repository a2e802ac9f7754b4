//! Reading of actions and pairs as they print.

use crate::{Action, Error, Kind, MicrobatchId, Pair, Result, StageId, action::Cell};
use serde::Deserialize;
use std::str::FromStr;

impl FromStr for Action {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        parse(text).ok_or_else(|| Error::ParseAction { found: text.into() })
    }
}

impl<'de> Deserialize<'de> for Action {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

impl FromStr for Pair {
    type Err = Error;

    /// Reads the two actions in either order.
    fn from_str(text: &str) -> Result<Self> {
        let inner = text.strip_prefix('(');
        let inner = inner.and_then(|text| text.strip_suffix(Self::SUFFIX)?.strip_suffix(')'));
        let pair = inner
            .and_then(|inner| inner.split_once(';'))
            .and_then(|(a, b)| {
                let (a, b) = (parse(a.trim())?, parse(b.trim())?);
                Self::new(a, b).or_else(|| Self::new(b, a))
            });
        pair.ok_or_else(|| Error::ParsePair { found: text.into() })
    }
}

impl FromStr for Cell {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.starts_with('(') {
            text.parse().map(Self::Paired)
        } else {
            text.parse().map(Self::Alone)
        }
    }
}

fn parse(text: &str) -> Option<Action> {
    let at = text.find(|c: char| !c.is_ascii_digit())?;
    let letter = text[at..].chars().next()?;
    let kind = Kind::from_letter(letter)?;
    // Digits only: `usize` alone would also take a plus sign.
    let digits = &text[at + letter.len_utf8()..];
    if !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    Some(Action {
        stage: StageId(text[..at].parse().ok()?),
        kind,
        microbatch: MicrobatchId(digits.parse().ok()?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_print_and_parse() {
        for kind in Kind::ALL {
            let action = Action::new(StageId(12), kind, MicrobatchId(345));
            assert_eq!(action.to_string().parse::<Action>().unwrap(), action);
        }
    }

    #[test]
    fn malformed_actions_are_refused_with_the_text() {
        for text in [
            "",
            "F0",
            "0F",
            "0X1",
            "0F+1",
            "0f1",
            "1F2 ",
            "é",
            "0é1",
            "99999999999999999999F0",
        ] {
            let error = text.parse::<Action>().unwrap_err();
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
        }
    }

    #[test]
    fn a_pair_is_read_in_either_order_and_a_malformed_one_is_refused_with_the_text() {
        let pair: Pair = "( 7B3 ; 0F7 )OVERLAP_F_B".parse().unwrap();
        assert_eq!(pair.to_string(), "(0F7;7B3)OVERLAP_F_B");
        for text in [
            "(0F7;7B3)",
            "(0F7,7B3)OVERLAP_F_B",
            "(0F7;7F3)OVERLAP_F_B",
            "(0F7;7I3)OVERLAP_F_B",
            "(0F7)OVERLAP_F_B",
            "()OVERLAP_F_B",
            "(0F7;7B3;1W0)OVERLAP_F_B",
            "(",
        ] {
            let error = text.parse::<Cell>().unwrap_err();
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
        }
    }

    #[test]
    fn the_ends_of_the_pipeline_wait_for_nothing() {
        let action = |text: &str| text.parse::<Action>().unwrap();
        assert_eq!(action("0F1").input(3), None);
        assert_eq!(action("2B1").input(3), None);
        assert_eq!(action("2F1").output(3), None);
        assert_eq!(action("0I1").output(3), None);
        let tag = action("1F4").input(3).unwrap();
        assert_eq!(
            tag.to_string(),
            "activation of microbatch 4 from stage 0 to stage 1"
        );
        assert_eq!(
            action("1I4").output(3).unwrap().to_string(),
            "gradient of microbatch 4 from stage 1 to stage 0"
        );
    }
}
