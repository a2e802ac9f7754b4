//! The groups of a process.

use super::{frame::GroupKey, op::GroupState};
use crate::{Rank, bell::lock, mailbox::Mailbox};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

/// All groups that this process or a peer has made, and this process is a member of.
#[derive(Debug, Default)]
pub(super) struct Groups {
    known: Mutex<BTreeMap<GroupKey, Arc<GroupState>>>,
    /// How many groups of a name and members this process has made.
    made: Mutex<BTreeMap<(String, Vec<Rank>), usize>>,
}

impl Groups {
    /// Makes this process's next group of a name and members.
    pub(super) fn make(&self, name: &str, members: &[Rank], own: Rank) -> Option<Arc<GroupState>> {
        let nth = {
            let mut made = lock(&self.made);
            let count = made.entry((name.to_owned(), members.to_vec())).or_default();
            *count += 1;
            *count - 1
        };
        self.join(&(name.to_owned(), members.to_vec(), nth), own)
    }

    /// The group of a key; none where this process is no member.
    pub(super) fn join(&self, key: &GroupKey, own: Rank) -> Option<Arc<GroupState>> {
        let me = key.1.binary_search(&own).ok()?;
        let mut known = lock(&self.known);
        let number = u32::try_from(known.len()).ok()?;
        let state = known.entry(key.clone()).or_insert_with(|| {
            Arc::new(GroupState {
                number,
                key: key.clone(),
                me,
                mailbox: Mailbox::default(),
            })
        });
        Some(Arc::clone(state))
    }
}
