//! What the owner of a cgroup says of its tasks: `user.stoker.feeder` (`yes` or `no`) and `user.stoker.gpu` (a GPU),
//! extended attributes of the cgroup's directory, as systemd-oomd has its own. They hold for the groups below, too,
//! until one says otherwise.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

mod limit;

pub use limit::{Limit, limits};

/// Where cgroup v2 is mounted.
pub const ROOT: &str = "/sys/fs/cgroup";

const FEEDER: &str = "user.stoker.feeder";
const GPU: &str = "user.stoker.gpu";

/// What was said of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Word {
    /// Its tasks are feeders, or are not; none if nothing was said, and scx_stoker finds out by itself.
    pub feeder: Option<bool>,
    /// The GPU that they feed: index, PCI address or UUID.
    pub gpu: Option<String>,
}

/// A process of which something was said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spoken {
    /// Its PID.
    pub pid: u32,
    /// Its group, below the root.
    pub group: PathBuf,
    /// What was said.
    pub word: Word,
}

/// All processes of which something was said, and what was said that makes no sense, for people.
pub fn spoken(root: &Path) -> (Vec<Spoken>, Vec<String>) {
    let (mut found, mut nonsense) = (Vec::new(), Vec::new());
    visit(root, root, &Word::default(), &mut found, &mut nonsense);
    (found, nonsense)
}

fn visit(root: &Path, dir: &Path, above: &Word, found: &mut Vec<Spoken>, nonsense: &mut Vec<String>) {
    let word = read_word(dir, above, nonsense);
    if word != Word::default() {
        let procs = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
        let group = dir.strip_prefix(root).unwrap_or(dir).to_path_buf();
        found.extend(
            procs
                .lines()
                .filter_map(|line| Some(Spoken { pid: line.parse().ok()?, group: group.clone(), word: word.clone() })),
        );
    }
    // A group that goes while it is looked at has no processes.
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            visit(root, &entry.path(), &word, found, nonsense);
        }
    }
}

fn read_word(dir: &Path, above: &Word, nonsense: &mut Vec<String>) -> Word {
    let feeder = match attribute(dir, FEEDER).as_deref() {
        None => above.feeder,
        Some("yes") => Some(true),
        Some("no") => Some(false),
        Some(other) => {
            nonsense.push(format!(
                "{FEEDER} of {} is '{other}', which is neither yes nor no: it is ignored",
                dir.display()
            ));
            above.feeder
        }
    };
    Word { feeder, gpu: attribute(dir, GPU).or_else(|| above.gpu.clone()) }
}

/// Whether groups take extended attributes, of which only one is read.
///
/// # Errors
/// Whatever else keeps it from being read.
pub fn takes_attributes(group: &Path) -> io::Result<bool> {
    match read_attribute(group, FEEDER, &mut [0; 256]) {
        Ok(_) => Ok(true),
        Err(error) => match error.raw_os_error() {
            Some(libc::ENODATA) => Ok(true),
            Some(libc::EOPNOTSUPP) => Ok(false),
            _ => Err(error),
        },
    }
}

/// The value of an extended attribute, without white space around it.
fn attribute(path: &Path, name: &str) -> Option<String> {
    let mut value = [0; 256];
    let length = read_attribute(path, name, &mut value).ok()?;
    let value = value.get(..length)?;
    Some(String::from_utf8_lossy(value).trim_end_matches('\0').trim().to_string())
}

/// Reads an extended attribute and returns its length.
fn read_attribute(path: &Path, name: &str, value: &mut [u8]) -> io::Result<usize> {
    let (path, name) = (CString::new(path.as_os_str().as_bytes())?, CString::new(name)?);
    // SAFETY: both strings end in NUL and live through the call; the length is the buffer's.
    let length = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
    usize::try_from(length).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sets an attribute; false where this file system has none.
    fn set(dir: &Path, name: &str, value: &str) -> bool {
        let path = CString::new(dir.as_os_str().as_bytes()).unwrap();
        let name = CString::new(name).unwrap();
        unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) == 0 }
    }

    /// A tree of groups, in a folder whose file system has extended attributes.
    fn tree() -> Option<tempfile::TempDir> {
        let root = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        for (group, pids) in [("", "1\n"), ("a", "2\n3\n"), ("a/b", "4\n"), ("c", "5\n")] {
            fs::create_dir_all(root.path().join(group)).unwrap();
            fs::write(root.path().join(group).join("cgroup.procs"), pids).unwrap();
        }
        if !set(root.path(), "user.stoker.test", "x") {
            eprintln!("skipped: no extended attributes in {}", root.path().display());
            return None;
        }
        Some(root)
    }

    #[test]
    fn what_is_said_holds_below_until_a_group_says_otherwise() {
        let Some(root) = tree() else { return };
        set(&root.path().join("a"), FEEDER, "yes");
        set(&root.path().join("a"), GPU, "1\n");
        set(&root.path().join("a/b"), FEEDER, "no");
        let (mut found, nonsense) = spoken(root.path());
        found.sort_by_key(|spoken| spoken.pid);
        let gpu = Some("1".to_string());
        let said: Vec<_> = found.iter().map(|spoken| (spoken.pid, spoken.word.clone())).collect();
        let yes = Word { feeder: Some(true), gpu: gpu.clone() };
        assert_eq!(said, [(2, yes.clone()), (3, yes), (4, Word { feeder: Some(false), gpu })]);
        assert!(nonsense.is_empty());
    }

    #[test]
    fn what_is_neither_yes_nor_no_is_told_and_ignored() {
        let Some(root) = tree() else { return };
        set(&root.path().join("c"), FEEDER, "maybe");
        let (found, nonsense) = spoken(root.path());
        assert!(found.is_empty());
        assert_eq!(nonsense.len(), 1);
        assert!(nonsense[0].contains("maybe"));
    }
}
