//! A head of its own for models whose head is their embedding.

use crate::disk::read_json;
use crate::family::family_of;
use crate::format::CONFIG;
use crate::{Checkpoint, Kind, Result};
use std::collections::BTreeMap;

impl Checkpoint {
    /// The weights as those of a model whose head and embedding are two tensors. Where they are
    /// one, the result has the parameters only, and that tensor under both names. The `config.json`
    /// beside the weights says which tensors they are; it does not change.
    ///
    /// # Errors
    /// As for [`Checkpoint::open`], where the header of a file is not what the manifest says.
    pub fn untied(self) -> Result<Self> {
        let config = read_json(&self.path().join(CONFIG)).unwrap_or_default();
        let tie = family_of(&config).and_then(|family| family.tie(&config));
        let has = |name| self.manifest().tensor(&Kind::Parameter, name).is_some();
        let Some(tie) = tie.filter(|tie| has(tie.embedding) && !has(tie.head)) else {
            return Ok(self);
        };
        let twin = tie.twin.filter(|[used, own]| has(used) && !has(own));
        let mut names = self.parameter_names();
        names.insert(tie.head.to_owned(), tie.embedding.to_owned());
        if let Some([tied, own]) = twin {
            names.remove(tied);
            names.insert(own.to_owned(), tied.to_owned());
        }
        self.renamed(&names)
    }

    /// The parameters under their own names, for [`Checkpoint::renamed`].
    pub(crate) fn parameter_names(&self) -> BTreeMap<String, String> {
        let parameters = self.manifest().tensors_of(&Kind::Parameter);
        let own = parameters.map(|tensor| (tensor.name.clone(), tensor.name.clone()));
        own.collect()
    }
}
