//! Work on a stream of items by several threads, with results in the order of the items.

use std::{sync::mpsc::sync_channel, thread};

use crate::error::{Result, no_thread};

/// Items, and results, that wait for each thread.
const AHEAD: usize = 2;

/// Calls `work` on each item, in `threads` threads, and `take` on each result, in the order of the
/// items. A thread reads the items ahead; item i is worker i mod W's.
///
/// # Errors
///
/// The first error of an item, of `work` or of `take`, by the order of the items; or the system
/// gives no thread.
pub(super) fn in_order<T: Send, R: Send>(
    items: impl Iterator<Item = Result<T>> + Send,
    threads: usize,
    work: impl Fn(T) -> Result<R> + Sync,
    mut take: impl FnMut(R) -> Result<()>,
) -> Result<()> {
    let task = "tokenize";
    let named = |name: String| thread::Builder::new().name(name);
    thread::scope(|scope| {
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        for number in 0..threads.max(1) {
            let (input, items) = sync_channel::<Result<T>>(AHEAD);
            let (output, results) = sync_channel(AHEAD);
            let work = &work;
            let run = move || {
                for item in items {
                    // Sending fails once an error has ended the work.
                    if output.send(item.and_then(work)).is_err() {
                        return;
                    }
                }
            };
            let thread = named(format!("merak-tokens-{number}")).spawn_scoped(scope, run);
            thread.map_err(no_thread(task))?;
            inputs.push(input);
            outputs.push(results);
        }
        let feed = move || {
            for (item, input) in items.zip((0..inputs.len()).cycle()) {
                if inputs[input].send(item).is_err() {
                    return;
                }
            }
        };
        let thread = named("merak-texts".to_owned()).spawn_scoped(scope, feed);
        thread.map_err(no_thread(task))?;
        // The first worker without a result is the one whose item would be the next.
        for results in outputs.iter().cycle() {
            let Ok(result) = results.recv() else {
                break;
            };
            take(result?)?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{DataError, Error};

    #[test]
    fn results_come_in_the_order_of_the_items_for_any_number_of_threads() {
        for threads in [0, 1, 2, 7] {
            for count in [0, 1, 5, 100_u64] {
                let mut found = Vec::new();
                let work = |item: u64| {
                    thread::sleep(std::time::Duration::from_micros(item * 7 % 50));
                    Ok(2 * item)
                };
                let take = |result| {
                    found.push(result);
                    Ok(())
                };
                in_order((0..count).map(Ok), threads, work, take).unwrap();
                assert_eq!(found, (0..count).map(|item| 2 * item).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn the_first_error_ends_the_work() {
        let failed = || Error::Data(DataError::DataThread);
        for fails in ["item", "work", "take"] {
            let at = |what: &str, item: u64| match item {
                9 if what == fails => Err(failed()),
                item => Ok(item),
            };
            // More items than would ever be read.
            let items = (0..u64::MAX).map(|item| at("item", item));
            let mut taken = 0;
            let work = |item| at("work", item);
            let take = |item| {
                taken += 1;
                at("take", item).map(|_| ())
            };
            let error = in_order(items, 3, work, take).unwrap_err();
            assert!(
                matches!(error, Error::Data(DataError::DataThread)),
                "{error}"
            );
            assert_eq!(taken, if fails == "take" { 10 } else { 9 });
        }
    }
}
