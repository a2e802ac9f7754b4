//! Folders of images, which Pillow wrote and read (`tests/goldens/images`).

use std::{fs, path::Path};

use insta::assert_snapshot;

use super::{
    Workplace,
    families::{gpt2, place, vit},
};

const GOLDENS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens/images");

/// A workplace with the images of the golden and a model of their size and classes.
fn golden() -> Workplace {
    let mut model = vit();
    model["image_size"] = 12.into();
    model["num_channels"] = 3.into();
    model["num_labels"] = 2.into();
    for dropout in ["hidden_dropout_prob", "attention_probs_dropout_prob"] {
        model[dropout] = 0.into();
    }
    model["label2id"] = serde_json::json!({ "dogs": 1, "cats": 0 });
    model["id2label"] = serde_json::json!({ "0": "cats", "1": "dogs" });
    let place = place(&model, "images", "images");
    place.write("gpt2.json", &gpt2().to_string());
    for class in ["cats", "dogs"] {
        let folder = place.path("images").join(class);
        fs::create_dir_all(&folder).expect("a writable folder");
        for file in fs::read_dir(Path::new(GOLDENS).join(class)).expect("the golden's folder") {
            let file = file.expect("a golden file");
            fs::copy(file.path(), folder.join(file.file_name())).expect("a writable folder");
        }
    }
    place
}

#[cfg(not(feature = "images"))]
#[test]
fn a_build_without_the_feature_names_it() {
    assert_snapshot!(golden().mistake("train merak.toml"), @r#"error: "data.format" "images" (merak.toml:16) is not in this build: build with --features images, or choose tensors"#);
}

#[cfg(feature = "images")]
mod with_the_feature {
    use super::*;
    use crate::cli::families::{assert_close, losses};
    use safetensors::{Dtype, tensor::TensorView};
    use serde_json::Value;

    /// The pixels as Pillow has them: files, and bytes of `[3, 12, 12]`.
    fn pixels() -> Vec<(String, Vec<u8>)> {
        let text = fs::read_to_string(Path::new(GOLDENS).join("pixels.json")).expect("the golden");
        let all: Value = serde_json::from_str(&text).expect("JSON");
        let all = all.as_object().expect("a list for each image").iter();
        let bytes = |value: &Value| value.as_u64().expect("a byte") as u8;
        all.map(|(name, list)| {
            let list = list.as_array().expect("a list").iter();
            (name.clone(), list.map(bytes).collect())
        })
        .collect()
    }

    #[test]
    fn images_are_learned_as_the_pixels_of_pillow() {
        let place = golden();
        let args =
            "--overwrite_output_dir --data.validation_fraction 0 --gradient_accumulation_steps 5";
        place.succeed(&format!("train merak.toml {args}"));
        let of_images = losses(&place);
        assert_eq!(of_images.len(), 3);
        for ranks in ["--pp 2", "--pp 2 --split_inputs true", "--tp 2"] {
            place.succeed(&format!("train merak.toml {args} {ranks}"));
            assert_close(&losses(&place), &of_images, 1e-4, ranks);
        }

        place.succeed("predict merak.toml run/checkpoints/step-00000003 -o lines.jsonl");
        let lines = fs::read_to_string(place.path("lines.jsonl")).expect("predictions");
        assert_eq!(lines.lines().count(), 5);
        for line in lines.lines() {
            let line: Value = serde_json::from_str(line).expect("JSON");
            let file = line["file"].as_str().expect("the file of the image");
            assert_eq!(file.contains("dogs"), line["label"] == 1, "{line}");
        }

        let pixels = pixels();
        let bytes: Vec<_> = pixels.iter().flat_map(|(_, bytes)| bytes.clone()).collect();
        let labels = pixels
            .iter()
            .map(|(name, _)| i64::from(name.starts_with("dogs")));
        let labels: Vec<_> = labels.flat_map(i64::to_le_bytes).collect();
        let view = |dtype, shape: &[usize], data| TensorView::new(dtype, shape.to_vec(), data);
        let tensors = [
            ("pixel_values", view(Dtype::U8, &[5, 3, 12, 12], &bytes)),
            ("labels", view(Dtype::I64, &[5], &labels)),
        ];
        let tensors = tensors.map(|(name, view)| (name, view.expect("whole tensors")));
        let file = place.path("pixels.safetensors");
        safetensors::serialize_to_file(tensors, None, &file).expect("a writable folder");
        place.succeed(&format!(
            "train merak.toml {args} --data.format tensors --data.path pixels.safetensors"
        ));
        // The same samples in one step each, in another order: their sums differ in rounding, and
        // a photo by what decoders may round otherwise.
        assert_close(&of_images, &losses(&place), 2e-4, "tensors");
    }

    #[test]
    fn folders_that_are_no_classes_and_files_that_are_no_images_are_named() {
        let place = golden();
        let mistake = || place.mistake("train merak.toml --overwrite_output_dir");
        fs::rename(place.path("images/dogs"), place.path("images/dog")).expect("it is there");
        assert_snapshot!(mistake(), @r#"error: the folder "dog" of "data.path" is not among the model's 2 classes: name it as in "label2id" of the model's configuration; did you mean "dogs"?"#);
        fs::rename(place.path("images/dog"), place.path("images/dogs")).expect("it is there");
        fs::copy(
            place.path("images/dogs/clear.png"),
            place.path("images/clear.png"),
        )
        .expect("it is there");
        assert_snapshot!(mistake(), @r#"error: images/clear.png is in no folder of a class: "data.format" images needs a folder for each class in "data.path""#);
        fs::remove_file(place.path("images/clear.png")).expect("it is there");
        for file in [
            "dogs/clear.png",
            "dogs/grey.png",
            "dogs/photo.JPG",
            "cats/wide.png",
            "cats/small.png",
        ] {
            place.write(&format!("images/{file}"), "no image");
        }
        let message = mistake();
        assert!(message.contains("cannot read the image"), "{message}");
        fs::remove_dir_all(place.path("images")).expect("it is there");
        fs::create_dir(place.path("images")).expect("a writable folder");
        assert_snapshot!(mistake(), @r#"error: no images in images: "data.format" images needs a folder for each class with files that end in .png, .jpg or .jpeg"#);
        assert_snapshot!(place.mistake("train merak.toml --model.config gpt2.json"), @r#"error: this gpt2 model is for causal language modelling, for which "data.format" images has nothing: choose text, jsonl, csv, tsv, parquet, tokens or tensors (merak.toml:16)"#);
    }
}
