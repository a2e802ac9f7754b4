//! Folders of images, one folder for each class.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    path::{Path, PathBuf},
};

use merak_ckpt::words::file;
use merak_mpu::names::nearest;

use super::{
    dataset::{Dataset, LABELS, Names, Sample},
    image_processor::Normalization,
    input::Input,
    inputs::ModelInputs,
    rng::hash,
    sample_tensor::SampleTensor,
    text::files_of,
};
use crate::error::{DataError, Error, Result};

/// The name of the tensor with the pixels.
const PIXEL_VALUES: &str = "pixel_values";

/// Whether a folder's file is an image, by its name.
pub(super) fn is_one(path: &Path) -> bool {
    let end = path.extension().map(OsStr::to_ascii_lowercase);
    end.is_some_and(|end| ["jpeg", "jpg", "png"].iter().any(|known| end == *known))
}

/// The files of images and the folders of their classes.
#[derive(Debug)]
pub(super) struct ImageFiles {
    /// The key that names the data.
    key: &'static str,
    /// Each file with the name of its class, in an order that mixes the classes.
    files: Vec<(PathBuf, String)>,
}

impl ImageFiles {
    /// Lists the images that an input names: in each of its folders a folder for each class.
    ///
    /// Their order follows from their names alone and mixes the classes, so that each share of
    /// them has all classes.
    pub(super) fn list(input: Input<'_>) -> Result<Self> {
        let mut found = Vec::new();
        for root in input.iter() {
            for file in files_of(input.key, root, &is_one)? {
                let below = file.path.strip_prefix(root).ok();
                let mut parts = below.into_iter().flat_map(Path::components);
                let class = parts.next().filter(|_| parts.next().is_some());
                let Some(class) = class else {
                    return Err(Error::Data(DataError::ImageWithoutClass {
                        path: file.path,
                    }));
                };
                let class = class.as_os_str().to_string_lossy().into_owned();
                let name = below.map(|below| below.to_string_lossy().into_owned());
                let words: Vec<_> = name
                    .iter()
                    .flat_map(|name| name.bytes())
                    .map(u64::from)
                    .collect();
                found.push((hash(&words), name, file.path, class));
            }
        }
        if found.is_empty() {
            return Err(Error::Data(DataError::NoImages {
                path: input.describe(),
            }));
        }
        found.sort_unstable();
        let files = found.into_iter().map(|(_, _, path, class)| (path, class));
        Ok(Self {
            key: input.key,
            files: files.collect(),
        })
    }

    /// The number of files.
    pub(super) fn len(&self) -> usize {
        self.files.len()
    }

    /// The names of the classes, in order.
    pub(super) fn classes(&self) -> BTreeSet<String> {
        self.files.iter().map(|(_, class)| class.clone()).collect()
    }

    /// The number of each class of `found`, those of all data: by the model's `label2id`, by the
    /// numbers that the folders are named with, or, where the model has no names, in the order of
    /// theirs.
    fn numbers<'n>(
        &self,
        found: &'n BTreeSet<String>,
        label2id: &BTreeMap<String, i64>,
        classes: usize,
    ) -> Result<BTreeMap<&'n str, i64>> {
        let is_class = |number: &i64| usize::try_from(*number).is_ok_and(|number| number < classes);
        let known = |class: &str| {
            let number = label2id.get(class).copied();
            number.or_else(|| class.parse().ok()).filter(is_class)
        };
        // Names such as LABEL_0, or 0, stand for none.
        let is_name = |name: &String| !name.starts_with("LABEL_") && name.parse::<i64>().is_err();
        let has_names = label2id.keys().any(is_name);
        if has_names || found.iter().any(|class| known(class).is_some()) {
            let number = |class: &'n String| match known(class) {
                Some(number) => Ok((class.as_str(), number)),
                None => Err(Error::Data(DataError::UnknownClass {
                    key: self.key,
                    class: class.clone(),
                    classes,
                    nearest: nearest(class, label2id.keys().map(String::as_str)).map(str::to_owned),
                })),
            };
            return found.iter().map(number).collect();
        }
        if found.len() != classes {
            return Err(Error::Data(DataError::OtherClasses {
                key: self.key,
                found: found.iter().cloned().collect(),
                classes,
            }));
        }
        Ok(found.iter().map(String::as_str).zip(0..).collect())
    }
}

/// Images and their classes.
///
/// Pixels are those of `ViTImageProcessor` of transformers: three colours or one grey, resized to
/// the model's size by Pillow's bilinear filter, with the mean and the deviation of its file.
///
/// # Shapes
///
/// `pixel_values: [C, H, W]`, `labels: []`.
#[derive(Debug)]
pub(super) struct ImageDataset {
    images: Vec<(PathBuf, i64)>,
    /// Channels, height and width.
    shape: [usize; 3],
    normalization: Normalization,
}

impl ImageDataset {
    /// The images of some files as a model reads them; `found` has the classes of all data, and
    /// `folder` the model's files where it has a folder.
    pub(super) fn new(
        files: &ImageFiles,
        found: &BTreeSet<String>,
        model: &ModelInputs,
        label2id: &BTreeMap<String, i64>,
        folder: Option<&Path>,
    ) -> Result<Self> {
        let pixels = model.get(PIXEL_VALUES).map(|input| &*input.shape);
        let Some(&[channels @ (1 | 3), height, width]) = pixels else {
            return Err(Error::Data(DataError::ImageShape {
                family: model.family,
                shape: pixels.unwrap_or_default().to_vec(),
            }));
        };
        let classes = model.get(LABELS).and_then(|labels| labels.limit);
        let numbers = files.numbers(found, label2id, classes.unwrap_or_default())?;
        let images = files.files.iter();
        let images = images.map(|(path, class)| (path.clone(), numbers[&**class]));
        Ok(Self {
            images: images.collect(),
            shape: [channels, height, width],
            normalization: Normalization::read(folder, channels)?,
        })
    }

    fn read(&self, index: usize, is_wanted: impl Fn(&str) -> bool) -> Result<Sample> {
        let (path, label) = &self.images[index];
        let mut sample = Sample::new();
        if is_wanted(PIXEL_VALUES) {
            let pixels = pixels(path, self.shape, &self.normalization).map_err(|reason| {
                Error::Data(DataError::Image {
                    path: path.clone(),
                    reason,
                })
            })?;
            let pixels = SampleTensor::floats(self.shape.to_vec(), pixels);
            let pixels = pixels.expect("as many pixels as the shape has");
            sample.insert(PIXEL_VALUES.to_owned(), pixels);
        }
        if is_wanted(LABELS) {
            let label = SampleTensor::new(Vec::new(), vec![*label]).expect("one number");
            sample.insert(LABELS.to_owned(), label);
        }
        Ok(sample)
    }
}

impl Dataset for ImageDataset {
    fn len(&self) -> usize {
        self.images.len()
    }

    fn get(&self, index: usize) -> Result<Sample> {
        self.read(index, |_| true)
    }

    fn name(&self, index: usize) -> Option<String> {
        self.images.get(index).map(|(path, _)| file(path))
    }

    fn reads_tensors(&self) -> bool {
        true
    }

    fn get_tensors(&self, index: usize, _epoch: u64, names: &Names) -> Result<Option<Sample>> {
        self.read(index, |name| names.contains(name)).map(Some)
    }
}

/// The pixels of an image file, channel by channel.
#[cfg(feature = "images")]
fn pixels(
    path: &Path,
    [channels, height, width]: [usize; 3],
    normalization: &Normalization,
) -> Result<Vec<f32>, String> {
    use fast_image_resize::{
        FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer, images::Image,
    };
    use image::{DynamicImage, ImageReader};
    use std::io::BufReader;

    let told = |error: &dyn std::fmt::Display| error.to_string();
    let (file, _) = merak_ckpt::open_regular(path).map_err(|error| told(&error))?;
    let reader = ImageReader::new(BufReader::new(file)).with_guessed_format();
    let decoded = reader.map_err(|error| told(&error))?.decode();
    let decoded = decoded.map_err(|error| told(&error))?;
    let (decoded, kind) = if channels == 1 {
        (DynamicImage::ImageLuma8(grey(decoded)), PixelType::U8)
    } else {
        let colours = decoded.into_rgb8();
        (DynamicImage::ImageRgb8(colours), PixelType::U8x3)
    };
    let side = |pixels: usize| u32::try_from(pixels).map_err(|error| told(&error));
    let mut resized = Image::new(side(width)?, side(height)?, kind);
    let bilinear = ResizeAlg::Convolution(FilterType::Bilinear);
    Resizer::new()
        .resize(
            &decoded,
            &mut resized,
            &ResizeOptions::new().resize_alg(bilinear),
        )
        .map_err(|error| told(&error))?;
    let pixels = resized.buffer();
    let plane = |channel| {
        let bytes = pixels.iter().skip(channel).step_by(channels);
        bytes.map(move |&byte| normalization.number(channel, byte))
    };
    Ok((0..channels).flat_map(plane).collect())
}

/// An image in grey, by the weights of ITU-R 601-2 as Pillow rounds them.
#[cfg(feature = "images")]
fn grey(image: image::DynamicImage) -> image::GrayImage {
    if !image.color().has_color() {
        return image.into_luma8();
    }
    let colours = image.into_rgb8();
    let grey = |pixel: &image::Rgb<u8>| {
        let [red, green, blue] = pixel.0.map(u32::from);
        let sum = red * 19_595 + green * 38_470 + blue * 7_471 + 0x8000;
        image::Luma([(sum >> 16) as u8])
    };
    image::GrayImage::from_fn(colours.width(), colours.height(), |x, y| {
        grey(colours.get_pixel(x, y))
    })
}

/// This build reads no images; configurations that name them are refused.
#[cfg(not(feature = "images"))]
fn pixels(_: &Path, _: [usize; 3], _: &Normalization) -> Result<Vec<f32>, String> {
    Err("this build reads no images".to_owned())
}
