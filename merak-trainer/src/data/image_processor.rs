//! How the bytes of an image become the numbers that a model reads.

use std::path::Path;

use merak_ckpt::words::file;
use serde_json::Value;

use crate::error::{DataError, Error, Result};

/// The file of a model's folder that says so.
const FILE: &str = "preprocessor_config.json";

/// Pillow's number for the bilinear filter.
const BILINEAR: u64 = 2;

/// The numbers of pixels: `(x · rescale - mean) / std`, mean and deviation by channel.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Normalization {
    rescale: f64,
    channels: Vec<[f64; 2]>,
}

impl Normalization {
    /// What the `preprocessor_config.json` in a model's folder says, else what `ViTImageProcessor`
    /// does by default.
    ///
    /// # Errors
    ///
    /// A file that cannot be read, or that asks for another size or filter than the model's size
    /// and the bilinear one.
    pub(super) fn read(folder: Option<&Path>, channels: usize) -> Result<Self> {
        let path = folder.map(|folder| folder.join(FILE));
        let Some(path) = path.filter(|path| path.is_file()) else {
            return Self::of(&Value::Null, channels).map_err(|reason| wrong(FILE, reason));
        };
        let text = merak_ckpt::read_text(&path, merak_ckpt::MAX_CONFIG_BYTES);
        let text = text.map_err(Error::reading(&path))?;
        let fields: std::result::Result<Value, String> =
            serde_json::from_str(&text).map_err(|error| error.to_string());
        let found = fields.and_then(|fields| Self::of(&fields, channels));
        found.map_err(|reason| wrong(&file(&path), reason))
    }

    /// What the fields of such a file say, or why it cannot be done here.
    fn of(fields: &Value, channels: usize) -> std::result::Result<Self, String> {
        let is = |name: &str, default: bool| fields[name].as_bool().unwrap_or(default);
        let refused = |name: &str, expected: &str| {
            Err(format!("`{name}` is {}, expected {expected}", fields[name]))
        };
        if !fields["resample"].is_null() && fields["resample"] != BILINEAR {
            return refused("resample", "2, the bilinear filter");
        }
        if !is("do_resize", true) {
            return refused("do_resize", "true");
        }
        if is("do_center_crop", false) {
            return refused("do_center_crop", "false");
        }
        if !fields["size"]["shortest_edge"].is_null() {
            return refused("size", "a height and a width, which are the model's");
        }
        let rescale = match (is("do_rescale", true), fields["rescale_factor"].as_f64()) {
            (false, _) => 1.0,
            (true, factor) => factor.unwrap_or(1.0 / 255.0),
        };
        let (mean, std) = if is("do_normalize", true) {
            (
                by_channel(fields, "image_mean", channels)?,
                by_channel(fields, "image_std", channels)?,
            )
        } else {
            (vec![0.0; channels], vec![1.0; channels])
        };
        if std.contains(&0.0) {
            return refused("image_std", "numbers other than 0");
        }
        let channels = mean.into_iter().zip(std).map(<[f64; 2]>::from);
        Ok(Self {
            rescale,
            channels: channels.collect(),
        })
    }

    /// The number for a byte of a channel.
    #[cfg_attr(
        not(any(feature = "images", test)),
        expect(dead_code, reason = "no image is read")
    )]
    pub(super) fn number(&self, channel: usize, byte: u8) -> f32 {
        let [mean, std] = self.channels[channel];
        ((f64::from(byte) * self.rescale - mean) / std) as f32
    }
}

/// A field with a number for each channel, or one for all; 0.5 where it is absent.
fn by_channel(
    fields: &Value,
    name: &str,
    channels: usize,
) -> std::result::Result<Vec<f64>, String> {
    let numbers = match &fields[name] {
        Value::Null => Some(vec![0.5; channels]),
        Value::Array(list) => list.iter().map(Value::as_f64).collect(),
        one => one.as_f64().map(|number| vec![number; channels]),
    };
    let numbers = numbers.filter(|numbers| numbers.len() == channels);
    numbers.ok_or_else(|| {
        let found = &fields[name];
        format!("`{name}` is {found}, expected a number for each of {channels} channels")
    })
}

fn wrong(path: &str, reason: String) -> Error {
    Error::Data(DataError::ImageProcessor {
        path: path.to_owned(),
        reason,
    })
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;
    use serde_json::json;

    use super::*;

    fn hundredths(normalization: &Normalization, channel: usize, byte: u8) -> i32 {
        (100.0 * normalization.number(channel, byte)).round() as i32
    }

    #[test]
    fn numbers_are_those_of_the_fields() {
        let usual = Normalization::of(&Value::Null, 3).unwrap();
        let ends = [0, 255].map(|byte| hundredths(&usual, 2, byte));
        assert_eq!(ends, [-100, 100]);
        let own = json!({ "image_mean": [0.5, 0.25, 0.0], "image_std": [0.5, 1.0, 0.25], "resample": 2,
            "size": { "height": 8, "width": 8 } });
        let own = Normalization::of(&own, 3).unwrap();
        let white = [0, 1, 2].map(|channel| hundredths(&own, channel, 255));
        assert_eq!(white, [100, 75, 400]);
        let plain = json!({ "do_normalize": false, "do_rescale": false });
        let plain = Normalization::of(&plain, 1).unwrap();
        assert_eq!(hundredths(&plain, 0, 7), 700);
    }

    #[test]
    fn what_is_not_done_here_is_refused() {
        let refused = |fields: Value| Normalization::of(&fields, 3).unwrap_err();
        assert_snapshot!(refused(json!({ "resample": 3 })), @"`resample` is 3, expected 2, the bilinear filter");
        assert_snapshot!(refused(json!({ "do_center_crop": true })), @"`do_center_crop` is true, expected false");
        assert_snapshot!(refused(json!({ "size": { "shortest_edge": 8 } })), @r#"`size` is {"shortest_edge":8}, expected a height and a width, which are the model's"#);
        assert_snapshot!(refused(json!({ "image_std": [1, 0, 1] })), @"`image_std` is [1,0,1], expected numbers other than 0");
        assert_snapshot!(refused(json!({ "image_mean": [1] })), @"`image_mean` is [1], expected a number for each of 3 channels");
    }

    #[test]
    fn a_file_that_is_no_json_is_named() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(FILE), "{").unwrap();
        let error = Normalization::read(Some(folder.path()), 3).unwrap_err();
        assert!(error.is_user_error());
        let text = error.to_string();
        assert!(text.contains(FILE) && text.contains("EOF"), "{text}");
    }
}
