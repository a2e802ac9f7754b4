//! The name of a job of hydra, the process manager of MPICH and Intel MPI, which tells its
//! processes none.
//!
//! A proxy of hydra on each host starts the processes there. Its command line says where `mpiexec`
//! listens, so it is the same on all hosts of a job, and no two jobs of a host have the same.

use std::{fs, path::Path};

/// The key under which the name of the job is looked up, beside variables.
pub(super) const JOB: &str = "mpiexec's port";

/// Most ancestors that are looked at.
const MOST_ANCESTORS: usize = 64;

/// The name of the job that this process is part of, where an ancestor is such a proxy.
pub(super) fn job() -> Option<String> {
    job_of_ancestors(Path::new("/proc"))
}

/// The same, with the folder of processes; there is none on other systems than Linux.
fn job_of_ancestors(processes: &Path) -> Option<String> {
    let mut process = "self".to_owned();
    for _ in 0..MOST_ANCESTORS {
        let folder = processes.join(&process);
        let stat = fs::read_to_string(folder.join("stat")).ok()?;
        parent(&stat)?.clone_into(&mut process);
        let line = fs::read(processes.join(&process).join("cmdline")).ok()?;
        let words = String::from_utf8_lossy(&line);
        if let Some(job) = job_of_proxy(&words.split('\0').collect::<Vec<_>>()) {
            return Some(job);
        }
    }
    None
}

/// The parent's number in the text that the system has of a process.
fn parent(stat: &str) -> Option<&str> {
    // The name before it may have blanks and parentheses.
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(1)
}

/// Where `mpiexec` listens, if these are the words of a proxy.
fn job_of_proxy(words: &[&str]) -> Option<String> {
    let program = Path::new(words.first()?).file_name()?.to_str()?;
    if !(program.starts_with("hydra_") && program.ends_with("_proxy")) {
        return None;
    }
    let value = |name: &str| {
        let at = words.iter().position(|word| *word == name)?;
        words.get(at + 1).copied()
    };
    // MPICH, and Intel MPI.
    let host_and_port = || {
        Some(format!(
            "{}:{}",
            value("--upstream-host")?,
            value("--upstream-port")?
        ))
    };
    value("--control-port")
        .map(str::to_owned)
        .or_else(host_and_port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_names_the_job_and_other_programs_do_not() {
        let job = |line: &str| job_of_proxy(&line.split(' ').collect::<Vec<_>>());
        let mpich = "/usr/bin/hydra_pmi_proxy --control-port n1:33739 --rmk user --pgid 0";
        assert_eq!(job(mpich).as_deref(), Some("n1:33739"));
        let intel = "hydra_bstrap_proxy --upstream-host n1 --upstream-port 41111 --pgid 0";
        assert_eq!(job(intel).as_deref(), Some("n1:41111"));
        for other in [
            "",
            "bash --control-port n1:1",
            "hydra_pmi_proxy --control-port",
        ] {
            assert_eq!(job(other), None, "{other}");
        }
    }

    #[test]
    fn the_parent_follows_a_name_of_any_letters() {
        assert_eq!(parent("7 (a) b (c)) S 42 7 7 0"), Some("42"));
        assert_eq!(parent("7 (a"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_without_such_an_ancestor_has_no_job() {
        let own = fs::read_to_string("/proc/self/stat").unwrap();
        assert_eq!(
            parent(&own).unwrap().parse(),
            Ok(std::os::unix::process::parent_id())
        );
        assert_eq!(job(), None);
    }
}
