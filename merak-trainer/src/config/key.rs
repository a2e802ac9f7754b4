//! The description of a key, and the macro that declares keys together with the struct that holds
//! them.

use std::{fmt, path::Path};

use serde_json::Value;

use super::{range::Range, refusal::Refusal, setting::Setting};

/// One configuration key of this version.
#[derive(Clone, Copy)]
pub struct Key {
    /// Full name: `tp`, or `data.path` for a key of a section.
    pub name: &'static str,
    /// What the key does, one sentence.
    pub doc: &'static str,
    /// The numbers that the key takes; of a list, each item.
    pub range: Range,
    /// What the key accepts, such as `an integer of at least 1`.
    pub expected: fn() -> String,
    /// The value when no layer sets the key.
    pub default: fn() -> Value,
    /// Whether a bare `--key` on the command line means true.
    pub is_flag: bool,
    /// Whether the key takes a list.
    pub is_list: bool,
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key")
            .field("name", &self.name)
            .field("expected", &(self.expected)())
            .field("default", &(self.default)())
            .finish_non_exhaustive()
    }
}

/// A value on its way into the configuration.
#[derive(Debug, Clone)]
pub(crate) enum Raw {
    /// A value with the type that its file gave it.
    Typed(Value),
    /// Text from the environment or the command line.
    Text(String),
}

/// Declares a struct of settings: `name: type [range] = default`, each with documentation, under a
/// prefix. The range, such as `[at_least 0, less_than 1]`, names constructors of [`Range`]; without
/// one a key takes all numbers of its type. Names, types, ranges, defaults and documentation of
/// keys have no other source.
macro_rules! settings {
    (
        $(#[$meta:meta])*
        $struct:ident under $prefix:literal {
            $( $(#[doc = $doc:literal])+ $field:ident: $type:ty $([$($bound:ident $limit:expr),+])?
                = $default:expr, )+
        }
        $( sections { $( $(#[doc = $section_doc:literal])+ $section:ident: $section_type:ty, )+ } )?
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq)]
        #[non_exhaustive]
        pub struct $struct {
            $( $(#[doc = $doc])+ pub $field: $type, )+
            $( $( $(#[doc = $section_doc])+ pub $section: $section_type, )+ )?
        }

        impl Default for $struct {
            fn default() -> Self {
                Self {
                    $( $field: $default, )+
                    $( $( $section: <$section_type>::default(), )+ )?
                }
            }
        }

        impl $struct {
            /// The keys declared here, without those of sections.
            pub(crate) const KEYS: &'static [$crate::config::key::Key] = &[
                $( $crate::config::key::Key {
                    name: concat!($prefix, stringify!($field)),
                    // Lines of a doc comment begin with a blank.
                    doc: concat!($($doc),+).trim_ascii(),
                    range: $crate::config::range::Range::ANY$($(.$bound($limit))+)?,
                    expected: || <$type as $crate::config::setting::Setting>::expected(
                        $crate::config::range::Range::ANY$($(.$bound($limit))+)?,
                    ),
                    default: || $crate::config::setting::Setting::to_value(&<$struct>::default().$field),
                    is_flag: <$type as $crate::config::setting::Setting>::IS_FLAG,
                    is_list: <$type as $crate::config::setting::Setting>::IS_LIST,
                }, )+
            ];

            /// Sets a key by its full name; `None` where the key is not known. Input paths are
            /// relative to `base`.
            pub(crate) fn set(
                &mut self,
                name: &str,
                raw: &$crate::config::key::Raw,
                base: &std::path::Path,
            ) -> Option<Result<(), $crate::config::refusal::Refusal>> {
                match name {
                    $( concat!($prefix, stringify!($field)) => {
                        Some($crate::config::key::read(raw, base).map(|value| self.$field = value))
                    } )+
                    _ => {
                        $( $( if let Some(result) = self.$section.set(name, raw, base) {
                            return Some(result);
                        } )+ )?
                        None
                    }
                }
            }

            /// The number of a key that lies outside the key's range, if there is one.
            pub(crate) fn outside(&self, key: &$crate::config::key::Key) -> Option<String> {
                match key.name {
                    $( concat!($prefix, stringify!($field)) => {
                        $crate::config::setting::Setting::outside(&self.$field, key.range)
                    } )+
                    _ => {
                        $( $( if let Some(found) = self.$section.outside(key) {
                            return Some(found);
                        } )+ )?
                        None
                    }
                }
            }

            /// The value of a key by its full name; `None` where the key is not known.
            pub(crate) fn get(&self, name: &str) -> Option<serde_json::Value> {
                match name {
                    $( concat!($prefix, stringify!($field)) => {
                        Some($crate::config::setting::Setting::to_value(&self.$field))
                    } )+
                    _ => {
                        $( $( if let Some(value) = self.$section.get(name) {
                            return Some(value);
                        } )+ )?
                        None
                    }
                }
            }
        }
    };
}

pub(crate) use settings;

/// Reads a raw value as the type that a field has.
pub(crate) fn read<T: Setting>(raw: &Raw, base: &Path) -> Result<T, Refusal> {
    let mut value = match raw {
        Raw::Typed(value) => T::from_value(value)?,
        Raw::Text(text) => T::from_text(text)?,
    };
    value.rebase(base);
    Ok(value)
}
