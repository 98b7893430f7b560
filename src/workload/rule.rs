//! What the configuration file says of threads: rules, of which the first that matches a thread counts.

use std::cell::LazyCell;
use std::path::Path;

use glob::{MatchOptions, Pattern};

use crate::cgroup::Word;

/// One rule. All that it asks for must hold of a thread.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rule {
    /// Where it is written, for people: file and line.
    pub place: String,
    /// The thread's cgroup, or one above it, below the cgroup2 root and without slashes around it. `*` and `?` match
    /// within one level, `**` any number of levels.
    pub cgroup: Option<Pattern>,
    /// The thread's own name (`comm`), which the kernel cuts off after 15 bytes.
    pub comm: Option<Pattern>,
    /// The effective user of its process.
    pub user: Option<u32>,
    /// What is said of such threads.
    pub word: Word,
}

/// The rules that can match a thread of one process, by index and in order: those whose cgroup and user fit. Nothing
/// comes after one that asks for no name, since it matches all threads. A reader is called once at most, and only if a
/// rule asks for what it tells; what cannot be told matches nothing.
pub fn of_process(
    rules: &[Rule],
    cgroup: impl FnOnce() -> Option<String>,
    user: impl FnOnce() -> Option<u32>,
) -> Vec<usize> {
    let (cgroup, user) = (LazyCell::new(cgroup), LazyCell::new(user));
    let mut fitting = Vec::new();
    for (index, rule) in rules.iter().enumerate() {
        let in_group = |pattern| cgroup.as_deref().is_some_and(|path| is_in_group(pattern, path));
        if rule.user.is_none_or(|uid| *user == Some(uid)) && rule.cgroup.as_ref().is_none_or(in_group) {
            fitting.push(index);
            if rule.comm.is_none() {
                break;
            }
        }
    }
    fitting
}

/// Of the rules that [`of_process`] found, the first that matches a thread. `comm` reads its name.
pub fn of_thread<'a>(rules: &'a [Rule], fitting: &[usize], comm: impl FnOnce() -> Option<String>) -> Option<&'a Rule> {
    let comm = LazyCell::new(comm);
    let is_named = |pattern: &Pattern| comm.as_deref().is_some_and(|name| pattern.matches(name));
    let mut rules = fitting.iter().filter_map(|&index| rules.get(index));
    rules.find(|rule| rule.comm.as_ref().is_none_or(is_named))
}

/// Whether a group, given by its path below the root, is one that `pattern` names, or is inside of one.
fn is_in_group(pattern: &Pattern, path: &str) -> bool {
    let options = MatchOptions { require_literal_separator: true, ..MatchOptions::new() };
    Path::new(path.trim_matches('/')).ancestors().any(|group| pattern.matches_path_with(group, options))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> Option<Pattern> {
        Some(Pattern::new(text).unwrap())
    }

    fn of(rules: &[Rule], cgroup: &str, user: u32, comm: &str) -> Option<usize> {
        let fitting = of_process(rules, || Some(cgroup.to_string()), || Some(user));
        let rule = of_thread(rules, &fitting, || Some(comm.to_string()))?;
        rules.iter().position(|other| std::ptr::eq(other, rule))
    }

    #[test]
    fn all_that_a_rule_asks_for_must_hold() {
        let rule = Rule { cgroup: pattern("a.slice"), comm: pattern("feed*"), user: Some(7), ..Rule::default() };
        let rules = [rule];
        assert_eq!(of(&rules, "/a.slice", 7, "feeder"), Some(0));
        assert_eq!(of(&rules, "/b.slice", 7, "feeder"), None);
        assert_eq!(of(&rules, "/a.slice", 8, "feeder"), None);
        assert_eq!(of(&rules, "/a.slice", 7, "loader"), None);
    }

    #[test]
    fn the_first_rule_that_matches_a_thread_counts() {
        let rules = [
            Rule { comm: pattern("main"), ..Rule::default() },
            Rule { user: Some(7), ..Rule::default() },
            Rule { comm: pattern("*"), ..Rule::default() },
        ];
        assert_eq!(of(&rules, "/", 7, "main"), Some(0));
        assert_eq!(of(&rules, "/", 7, "worker"), Some(1));
        assert_eq!(of(&rules, "/", 8, "worker"), Some(2));
    }

    #[test]
    fn a_group_is_matched_with_all_below_it_and_a_star_stays_within_a_level() {
        let is_in = |text: &str, path: &str| is_in_group(&Pattern::new(text).unwrap(), path);
        assert!(is_in("system.slice/*.service", "/system.slice/exporter.service"));
        assert!(is_in("system.slice/*.service", "/system.slice/exporter.service/sub/group"));
        assert!(!is_in("system.slice/*.service", "/system.slice/sub/exporter.service"));
        assert!(is_in("**/exporter.service", "/system.slice/sub/exporter.service"));
        assert!(!is_in("system.slice/*.service", "/system.slice"));
        assert!(!is_in("a", "/ab"));
        assert!(is_in("", "/any/group"), "the root holds all groups");
    }

    #[test]
    fn nothing_is_read_that_no_rule_asks_for_and_nothing_twice() {
        let names = [Rule { comm: pattern("a"), ..Rule::default() }, Rule { comm: pattern("b"), ..Rule::default() }];
        let fitting = of_process(&names, || panic!("no rule asks for a group"), || panic!("no rule asks for a user"));
        assert_eq!(fitting, [0, 1]);
        let mut reads = 0;
        let read = || {
            reads += 1;
            Some("b".to_string())
        };
        assert_eq!(of_thread(&names, &fitting, read), Some(&names[1]));
        assert_eq!(reads, 1);
        let users = [Rule { user: Some(7), ..Rule::default() }];
        let fitting = of_process(&users, || panic!("no rule asks for a group"), || Some(7));
        assert!(of_thread(&users, &fitting, || panic!("no rule asks for a name")).is_some());
    }

    #[test]
    fn what_cannot_be_read_matches_nothing() {
        let rules = [Rule { cgroup: pattern("**"), ..Rule::default() }];
        assert!(of_process(&rules, || None, || None).is_empty());
        let rules = [Rule { comm: pattern("*"), ..Rule::default() }];
        assert_eq!(of_thread(&rules, &[0], || None), None);
    }
}
