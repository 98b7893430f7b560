//! Applies what people say of threads: cgroups' owners (see [`crate::cgroup`]) and the rules of the configuration file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Result;

use super::process::{Process, Reader};
use super::rule::{self, Rule};
use crate::cgroup::{self, Spoken};
use crate::machine::{Gpu, Machine, gpu_named};
use crate::scheduler::Scheduler;

/// What is said now.
#[derive(Debug)]
pub struct Words<'a> {
    gpus: Vec<Gpu>,
    rules: &'a [Rule],
    /// By PID.
    said: BTreeMap<u32, Said>,
    /// What was told to people already: each once.
    told: BTreeSet<String>,
}

/// A process of whose threads something may be said.
#[derive(Debug)]
struct Said {
    process: Process,
    /// By the owner of its cgroup.
    owner: Option<Spoken>,
    /// Rules that can match its threads: see [`rule::of_process`].
    fitting: Vec<usize>,
}

/// What is said of one thread.
#[derive(Debug, PartialEq)]
enum Verdict<'a> {
    /// It feeds the GPU of this name, or the GPUs that its process uses.
    Feeder(Option<&'a str>),
    /// It feeds none, whatever it does.
    Ordinary,
}

impl<'a> Words<'a> {
    /// Nothing is known to be said yet.
    pub fn new(machine: &Machine, rules: &'a [Rule]) -> Self {
        Self { gpus: machine.gpus.clone(), rules, said: BTreeMap::new(), told: BTreeSet::new() }
    }

    /// Reads what all cgroups say and, if there are rules, which processes they concern.
    pub fn read(&mut self, reader: &Reader) {
        let (spoken, nonsense) = cgroup::spoken(Path::new(cgroup::ROOT));
        self.said.clear();
        for owner in spoken {
            if let Some(process) = reader.process(owner.pid) {
                self.said.insert(owner.pid, Said { process, owner: Some(owner), fitting: Vec::new() });
            }
        }
        if !self.rules.is_empty() {
            for process in reader.all() {
                self.match_rules(reader, process);
            }
        }
        for complaint in nonsense {
            self.tell(complaint);
        }
    }

    /// Takes in the rules for one process, if one of them matches one of its threads.
    fn match_rules(&mut self, reader: &Reader, process: Process) {
        let fitting = rule::of_process(self.rules, || reader.cgroup(&process), || reader.user(&process));
        let matches = |&tid: &u32| rule::of_thread(self.rules, &fitting, || reader.name(&process, tid)).is_some();
        if fitting.is_empty() || !reader.threads(&process).iter().any(matches) {
            return;
        }
        let said = self.said.entry(process.pid).or_insert(Said { process, owner: None, fitting: Vec::new() });
        said.fitting = fitting;
    }

    /// Tells the BPF side. `uses` gives the GPUs, as bits, that a process is known to use.
    ///
    /// # Errors
    /// The BPF side could not be told.
    pub fn apply(&mut self, scheduler: &Scheduler, reader: &Reader, uses: impl Fn(u32) -> u64) -> Result<()> {
        let mut complaints = Vec::new();
        for (&pid, said) in &self.said {
            if reader.process(pid).as_ref() != Some(&said.process) {
                continue;
            }
            let owner = said.owner.as_ref();
            for tid in reader.threads(&said.process) {
                let rule = rule::of_thread(self.rules, &said.fitting, || reader.name(&said.process, tid));
                let feeds = match verdict(owner, rule) {
                    None => continue,
                    Some(Verdict::Ordinary) => None,
                    Some(Verdict::Feeder(name)) => match gpus_of(&self.gpus, name, uses(pid)) {
                        Ok(gpus) => Some(gpus),
                        Err(complaint) => {
                            complaints.push(format!("{}: {complaint}", source(owner, rule)));
                            continue;
                        }
                    },
                };
                scheduler.name_thread(tid, feeds)?;
            }
        }
        for complaint in complaints {
            self.tell(complaint);
        }
        Ok(())
    }

    fn tell(&mut self, complaint: String) {
        if !self.told.contains(&complaint) {
            log::warn!("{complaint}");
            self.told.insert(complaint);
        }
    }
}

/// What is said of a thread by the owner of its cgroup, or else by the first rule that matches it. Who names a GPU and
/// says nothing more says that the thread feeds it.
fn verdict<'a>(owner: Option<&'a Spoken>, rule: Option<&'a Rule>) -> Option<Verdict<'a>> {
    let words = || [owner.map(|owner| &owner.word), rule.map(|rule| &rule.word)].into_iter().flatten();
    let gpu = words().find_map(|word| word.gpu.as_deref());
    match words().find_map(|word| word.feeder.or(word.gpu.is_some().then_some(true)))? {
        true => Some(Verdict::Feeder(gpu)),
        false => Some(Verdict::Ordinary),
    }
}

/// Who says so, for people.
fn source(owner: Option<&Spoken>, rule: Option<&Rule>) -> String {
    let owner = owner.map(|owner| format!("user.stoker of cgroup {}", owner.group.display()));
    let rule = rule.map(|rule| rule.place.clone());
    [owner, rule].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// The GPUs, as bits, of that name, or else those that the process is known to use.
fn gpus_of(gpus: &[Gpu], name: Option<&str>, used: u64) -> Result<u64, String> {
    match name {
        Some(name) => match gpu_named(gpus, name) {
            Some(gpu) if gpu.index < u64::BITS => Ok(1 << gpu.index),
            _ => Err(format!("'{name}' is no GPU here: `scx_stoker topology` shows them")),
        },
        None if used == 0 => {
            Err("threads are said to feed a GPU, and not which, and their process is not known to use \
                                  one: name the GPU, too"
                .into())
        }
        None => Ok(used),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::Word;

    fn word(feeder: Option<bool>, gpu: Option<&str>) -> Word {
        Word { feeder, gpu: gpu.map(str::to_string) }
    }

    fn owner(word: Word) -> Spoken {
        Spoken { pid: 1, group: "a".into(), word }
    }

    fn rule(word: Word) -> Rule {
        Rule { place: "file:1".into(), word, ..Rule::default() }
    }

    #[test]
    fn the_owner_of_the_cgroup_wins_over_the_file_in_each_thing_that_he_says() {
        let feeds = rule(word(Some(true), Some("1")));
        assert_eq!(verdict(None, Some(&feeds)), Some(Verdict::Feeder(Some("1"))));
        assert_eq!(verdict(Some(&owner(word(Some(false), None))), Some(&feeds)), Some(Verdict::Ordinary));
        assert_eq!(verdict(Some(&owner(word(None, Some("0")))), Some(&feeds)), Some(Verdict::Feeder(Some("0"))));
        assert_eq!(verdict(Some(&owner(word(Some(true), None))), Some(&feeds)), Some(Verdict::Feeder(Some("1"))));
        let barred = rule(word(Some(false), None));
        assert_eq!(verdict(Some(&owner(word(Some(true), None))), Some(&barred)), Some(Verdict::Feeder(None)));
    }

    #[test]
    fn who_names_a_gpu_alone_says_that_it_is_fed() {
        assert_eq!(verdict(None, Some(&rule(word(None, Some("1"))))), Some(Verdict::Feeder(Some("1"))));
        assert_eq!(verdict(None, None), None);
    }

    #[test]
    fn a_complaint_names_all_who_spoke() {
        let (owner, rule) = (owner(word(Some(true), None)), rule(word(None, Some("9"))));
        assert_eq!(source(Some(&owner), Some(&rule)), "user.stoker of cgroup a, file:1");
    }
}
