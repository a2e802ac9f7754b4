//! Parameters that checkpoints share, kept once beside them.

use crate::manifest::read_manifest;
use crate::{Base, Checkpoint, Checksum, Draft, Result, Store, format};

impl Store {
    /// Opens a base. Returns the entry for the manifests of checkpoints on it, and its tensors.
    ///
    /// # Errors
    /// As for [`Checkpoint::open`].
    pub fn base(&self, number: u64) -> Result<(Base, Checkpoint)> {
        let folder = format::base_name(number);
        let path = self.folder().join(&folder);
        let checksum = Checksum::of(&read_manifest(&path)?);
        Ok((Base { folder, checksum }, Checkpoint::load(&path)?))
    }

    /// Starts a base, at a step that its manifest notes, as [`Store::begin`] starts a checkpoint:
    /// one rank calls it, and the others call [`Store::base_draft`].
    ///
    /// # Errors
    /// As for [`Store::begin`].
    pub fn begin_base(&self, number: u64, step: u64) -> Result<Draft> {
        self.begin_draft(self.base_draft(number, step))
    }

    /// The base that [`Store::begin_base`] has started; touches nothing.
    pub fn base_draft(&self, number: u64, step: u64) -> Draft {
        Draft::of_base(self.clone(), number, step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{Manifest, parse_manifest};
    use crate::{DType, Header, Kind, Layout, Piece, ReshardOptions, ShardKind, reshard};
    use std::fs;
    use std::path::{Path, PathBuf};

    /// Commits a draft with tensors of one byte each.
    fn commit(draft: &Draft, tensors: &[(&str, u8)]) {
        let layout = Layout::whole(&[1]);
        let bytes: Vec<_> = tensors.iter().map(|(_, value)| [*value]).collect();
        let pieces = tensors.iter().zip(&bytes).map(|((name, _), bytes)| {
            let piece = Piece::parameter(name, DType::U8, &layout);
            (piece, bytes.as_slice())
        });
        let pieces: Vec<_> = pieces.collect();
        let shard = draft.write_shard(ShardKind::Model, 0, &pieces).unwrap();
        draft.commit(vec![shard], Header::default(), &[]).unwrap();
    }

    fn store(folder: &Path) -> Store {
        let store = Store::new(folder);
        commit(&store.begin_base(1, 1).unwrap(), &[("frozen", 1)]);
        let (base, _) = store.base(1).unwrap();
        for step in [1, 2] {
            let draft = store.begin(step).unwrap().with_base(Some(base.clone()));
            commit(&draft, &[("a", 2), ("z", step as u8)]);
        }
        store
    }

    fn refusal(store: &Store) -> String {
        let error = Checkpoint::open(store.path_of(2)).unwrap_err().to_string();
        error.replace(&store.folder().display().to_string(), "DIR")
    }

    #[test]
    fn a_checkpoint_has_the_tensors_of_its_base_and_outlives_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path());
        assert_eq!(
            (store.bases().unwrap(), store.steps().unwrap()),
            (vec![1], vec![1, 2])
        );
        assert_eq!(store.rotate(1, &[]).unwrap(), [1]);
        assert_eq!(store.bases().unwrap(), [1]);
        let saved = Checkpoint::open(folder.path()).unwrap();
        let names = |saved: &Checkpoint| -> Vec<_> {
            let tensors = saved.manifest().tensors.iter();
            tensors.map(|tensor| tensor.name.clone()).collect()
        };
        assert_eq!(names(&saved), ["a", "frozen", "z"]);
        assert_eq!(saved.read_whole(&Kind::Parameter, "frozen").unwrap(), [1]);
        assert_eq!(
            (saved.verify().files, saved.verify().damage),
            (2, Vec::new())
        );

        let alone = folder.path().join("alone");
        let alone = reshard(&saved, &alone, &ReshardOptions::default()).unwrap();
        let text = fs::read_to_string(alone.join(format::MANIFEST)).unwrap();
        assert!(text.contains("\"version\": 1,\n") && !text.contains("\"base\""));
        let alone = Checkpoint::open(&alone).unwrap();
        assert_eq!(names(&alone), names(&saved));
        assert_eq!(alone.read_whole(&Kind::Parameter, "frozen").unwrap(), [1]);
    }

    #[test]
    fn later_checkpoints_move_with_a_base_of_their_own_and_the_earlier_ones_keep_theirs() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(&folder.path().join("run"));
        store.set_best(Some(2)).unwrap();
        let aside = Store::new(folder.path().join("aside"));
        assert!(store.move_later(2, &aside).unwrap().is_empty());
        assert!(!aside.folder().exists(), "nothing is later");
        assert_eq!(store.move_later(1, &aside).unwrap(), [2]);
        let pointers = |store: &Store| (store.latest().unwrap(), store.best().unwrap());
        assert_eq!(pointers(&store), (Some(store.path_of(1)), None));
        let moved = Some(aside.path_of(2));
        assert_eq!(pointers(&aside), (moved.clone(), moved));
        // Either outlives the other.
        let is_whole = |path: PathBuf| Checkpoint::open(path).unwrap().verify().damage.is_empty();
        assert!(is_whole(store.path_of(1)) && is_whole(aside.path_of(2)));
        fs::remove_dir_all(store.folder()).unwrap();
        assert!(is_whole(aside.path_of(2)));
    }

    #[test]
    fn a_base_that_is_gone_changed_or_damaged_is_an_error_that_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path());
        let base = folder.path().join("base-00001");
        let file = base.join("model-00000.safetensors");
        let content = fs::read(&file).unwrap();
        let mut damaged = content.clone();
        *damaged.last_mut().unwrap() ^= 1;
        fs::write(&file, damaged).unwrap();
        let found = Checkpoint::open(store.path_of(2)).unwrap().verify().damage;
        assert!(!found.is_empty());
        assert!(
            found
                .iter()
                .all(|damage| damage.file == "../base-00001/model-00000.safetensors")
        );
        fs::write(&file, content).unwrap();

        fs::rename(&base, folder.path().join("elsewhere")).unwrap();
        insta::assert_snapshot!(refusal(&store), @"checkpoint DIR/step-00000002 is damaged: ../base-00001/manifest.json: the parameters that the checkpoint does not train lay there, and the folder is gone: put it back beside the checkpoint, or take what `merak-ckpt reshard` writes where both are; there is no complete older one");
        commit(&store.begin_base(1, 1).unwrap(), &[("frozen", 9)]);
        assert!(refusal(&store).contains("../base-00001/manifest.json: the parameters that the checkpoint does not train lay there, and now others do: put the checkpoint's own base back (checksum "));
    }

    #[test]
    fn a_base_that_no_checkpoint_names_is_removed_with_the_next_rotation() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path());
        commit(&store.begin(3).unwrap(), &[("frozen", 1), ("z", 3)]);
        for keeps_all in [0, 2] {
            store.rotate(keeps_all, &[]).unwrap();
            assert_eq!(store.bases().unwrap(), [1], "step 2 depends on it");
        }
        let manifest = store.path_of(2).join(format::MANIFEST);
        let text = fs::read(&manifest).unwrap();
        fs::write(&manifest, "{").unwrap();
        store.rotate(0, &[]).unwrap();
        assert_eq!(store.bases().unwrap(), [1], "it may depend on it");
        fs::write(&manifest, text).unwrap();

        // A checkpoint that is being written may use the base before a manifest says so.
        let draft = store.begin(4).unwrap();
        assert_eq!(store.rotate(1, &[]).unwrap(), [2]);
        assert_eq!(store.bases().unwrap(), [1]);
        drop(draft);
        let unfinished = [
            ".tmp-base-00002",
            ".replaced-base-00001",
            ".tmp-delete-base-00001",
        ];
        for name in unfinished {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        let (own, others) = store.entries().unwrap();
        assert!(others.is_empty(), "{others:?}");
        assert!(own.contains(&"base-00001".to_owned()));
        store.clean().unwrap();
        assert!(store.rotate(0, &[]).unwrap().is_empty());
        assert!(store.bases().unwrap().is_empty());
        assert_eq!(store.names().unwrap(), ["latest", "step-00000003"]);
    }

    #[test]
    fn a_base_lies_beside_its_checkpoint_and_has_none_of_its_tensors() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path());
        let (base, _) = store.base(1).unwrap();
        let text = fs::read(store.path_of(2).join(format::MANIFEST)).unwrap();
        let manifest = parse_manifest(folder.path(), &text).unwrap();
        let with = |base: Option<Base>| {
            let manifest = Manifest {
                base,
                ..manifest.clone()
            };
            parse_manifest(folder.path(), manifest.to_text().as_bytes())
        };
        assert!(with(None).is_ok());
        let elsewhere = ["../base-00001", "base-1", "base-+0001", "/tmp", ""];
        for outside in elsewhere {
            let folder = outside.to_owned();
            let error = with(Some(Base {
                folder,
                ..base.clone()
            }))
            .unwrap_err();
            assert!(
                error
                    .to_string()
                    .contains("expected a folder like base-00001")
            );
        }
        // Manifests of earlier versions have no base.
        let text = String::from_utf8(text)
            .unwrap()
            .replace("\"version\": 2", "\"version\": 1");
        let body = &text[..text.rfind("\"checksum\"").unwrap()];
        let text = format!(
            "{body}\"checksum\": \"{}\"\n}}\n",
            Checksum::of(body.as_bytes())
        );
        let error = parse_manifest(folder.path(), text.as_bytes()).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("the version is 1, expected 2 with a base")
        );

        let draft = store.begin(3).unwrap().with_base(Some(base));
        commit(&draft, &[("frozen", 2)]);
        let error = Checkpoint::open(store.path_of(3)).unwrap_err().to_string();
        assert!(
            error.contains("tensors are not in order, or not unique"),
            "{error}"
        );
    }
}
