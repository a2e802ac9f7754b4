//! A head of its own for models whose head is their embedding.

use super::{CONFIG, family_of, read_json};
use crate::{Checkpoint, Kind, Result};

impl Checkpoint {
    /// The weights as those of a model whose head and embedding are two tensors: where they are one, under both names,
    /// parameters only. The `config.json` beside the weights says which they are; it is left as it is.
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
        let twins = tie.twin.filter(|[used, own]| has(used) && !has(own));
        let twins = twins.map(|[used, own]| [own, used]);
        self.with_twins([[tie.head, tie.embedding]].into_iter().chain(twins))
    }

    /// The parameters, some of them under second names as well: `[second, own]`.
    pub(crate) fn with_twins<'a>(
        &self,
        twins: impl IntoIterator<Item = [&'a str; 2]>,
    ) -> Result<Self> {
        let parameters = self.manifest().tensors_of(&Kind::Parameter);
        let own = parameters.map(|tensor| (tensor.name.clone(), tensor.name.clone()));
        let twins = twins.into_iter().map(|twin| twin.map(str::to_owned).into());
        self.renamed(&own.chain(twins).collect())
    }
}
