//! Trees of groups with tasks in them, and the CPU time that each is due: what perfect fairness would give.

use clap::ValueEnum;
use serde::Serialize;

use crate::sys::TaskPolicy;

/// Weight of a task of nice 0, and of a group whose `cpu.weight` is 100, in the kernel's units.
const UNIT_WEIGHT: f64 = 1024.0;
/// Weight of a SCHED_IDLE task and of a group with `cpu.idle`, likewise.
const IDLE_WEIGHT: f64 = 3.0;
/// CPUs that a bursty neighbour uses if nothing holds it up: 0.6 ms of work, then 1.25 ms of sleep, on average.
const BURSTY_CPUS: f64 = 0.6 / (0.6 + 1.25);

/// A group.
#[derive(Clone, Debug)]
pub struct Group {
    /// Name of its directory; the root's is not used.
    pub name: String,
    /// Its weight among its siblings.
    pub weight: GroupWeight,
    /// `cpu.max`, in CPUs.
    pub limit_cpus: Option<f64>,
    /// `cpuset.cpus`.
    pub cpus: Option<std::ops::Range<usize>>,
    /// Tasks in the group itself.
    pub tasks: Vec<Tasks>,
    /// Groups in it.
    pub groups: Vec<Group>,
}

/// A group's weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GroupWeight {
    /// `cpu.weight`
    Weight(u32),
    /// `cpu.idle`
    Idle,
}

/// Tasks that are all alike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tasks {
    /// How many.
    pub count: usize,
    /// What they do.
    pub kind: TaskKind,
    /// Their nice value.
    pub nice: i32,
    /// Their scheduling policy.
    pub policy: TaskPolicy,
}

/// What a task does; see `neighbours`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TaskKind {
    /// Computes without a pause.
    Hog,
    /// Computes and sleeps.
    Bursty,
    /// Has short-lived children compute.
    Forker,
}

/// A tree to measure.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Tree {
    /// Three groups of weight 100, 300 and 100, the last with two groups of weight 100 and 200 in it
    Groups,
    /// 60 leaf groups in four levels, with weights and hogs of all kinds
    Deep,
    /// Groups of weight 100 and 300 whose tasks compute for a moment and sleep, and together want far more than there is
    Sleepers,
    /// A group of weight 100 whose tasks do all their work in children of 2 ms, and one of weight 300 with hogs
    Forkers,
    /// Hogs of different nice values in one group, and a group beside it
    Nice,
    /// A group that is restricted to CPUs 0 and 1, and one that is free
    Cpuset,
    /// A group with cpu.idle, SCHED_IDLE and SCHED_BATCH tasks, beside normal ones
    Idle,
    /// Groups with limits (cpu.max), one inside another, for hogs and for bursty tasks
    Max,
}

impl Tree {
    /// Its name on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_string())
    }

    /// The groups and tasks of it.
    pub fn root(self) -> Group {
        match self {
            Self::Groups => root([
                leaf("a100", 100, hogs(8)),
                leaf("b300", 300, hogs(4)),
                branch("c100", 100, [leaf("x100", 100, hogs(4)), leaf("y200", 200, hogs(8))]),
            ]),
            Self::Deep => deep(),
            Self::Sleepers => root([leaf("a100", 100, bursty(16)), leaf("b300", 300, bursty(16))]),
            Self::Forkers => root([leaf("a100", 100, forkers(8)), leaf("b300", 300, hogs(8))]),
            Self::Nice => {
                let with_nice = |nice| Tasks { nice, ..hogs(2) };
                let mixed = Group { tasks: [0, 5, -5].map(with_nice).to_vec(), ..group("mixed", 100) };
                root([mixed, leaf("plain", 100, hogs(2))])
            }
            Self::Cpuset => {
                let tied = Group { cpus: Some(0..2), ..leaf("tied", 100, hogs(4)) };
                root([tied, leaf("free", 300, hogs(8))])
            }
            Self::Idle => {
                let policy = |policy| Tasks { policy, ..hogs(4) };
                let normal = vec![hogs(4), policy(TaskPolicy::Batch)];
                let mixed = vec![hogs(4), policy(TaskPolicy::Idle)];
                root([
                    Group { tasks: normal, ..group("normal", 100) },
                    Group { tasks: mixed, ..group("mixed", 100) },
                    Group { weight: GroupWeight::Idle, ..leaf("idle", 100, hogs(4)) },
                ])
            }
            Self::Max => {
                let limited = |cpus, group| Group { limit_cpus: Some(cpus), ..group };
                root([
                    limited(0.5, leaf("half", 100, hogs(2))),
                    limited(1.5, leaf("more", 400, hogs(4))),
                    limited(
                        0.7,
                        branch("outer", 100, [leaf("open", 100, hogs(2)), limited(0.25, leaf("inner", 100, hogs(2)))]),
                    ),
                    limited(0.5, leaf("bursty", 100, bursty(4))),
                    leaf("free", 100, hogs(4)),
                ])
            }
        }
    }
}

/// Three, two, two and five groups in each of the groups above.
fn deep() -> Group {
    let leaves = |seed: usize| {
        let weights = [80, 100, 100, 120, 200];
        let hogs_of = |index: usize| hogs(1 + (seed + index) % 3);
        (0..5).map(|index| leaf(&format!("l{index}"), weights[(seed + index) % 5], hogs_of(index))).collect()
    };
    let inner = |seed: usize| {
        let of = |(index, weight): (usize, u32)| Group {
            groups: leaves(2 * seed + index),
            ..group(&format!("k{index}"), weight)
        };
        [100, 150].into_iter().enumerate().map(of).collect()
    };
    let outer = |seed: usize| {
        let of = |(index, weight): (usize, u32)| Group {
            groups: inner(2 * seed + index),
            ..group(&format!("j{index}"), weight)
        };
        [100, 200].into_iter().enumerate().map(of).collect()
    };
    let of = |(index, weight): (usize, u32)| Group { groups: outer(index), ..group(&format!("i{index}"), weight) };
    Group { groups: [100, 150, 250].into_iter().enumerate().map(of).collect(), ..group("", 100) }
}

fn group(name: &str, weight: u32) -> Group {
    let (name, weight) = (name.to_string(), GroupWeight::Weight(weight));
    Group { name, weight, limit_cpus: None, cpus: None, tasks: Vec::new(), groups: Vec::new() }
}

fn root<const N: usize>(groups: [Group; N]) -> Group {
    branch("", 100, groups)
}

fn branch<const N: usize>(name: &str, weight: u32, groups: [Group; N]) -> Group {
    Group { groups: groups.into(), ..group(name, weight) }
}

fn leaf(name: &str, weight: u32, tasks: Tasks) -> Group {
    Group { tasks: vec![tasks], ..group(name, weight) }
}

fn hogs(count: usize) -> Tasks {
    Tasks { count, kind: TaskKind::Hog, nice: 0, policy: TaskPolicy::Normal }
}

/// Tasks that compute for a moment and sleep.
fn bursty(count: usize) -> Tasks {
    Tasks { kind: TaskKind::Bursty, ..hogs(count) }
}

/// Tasks that have children compute for a moment.
fn forkers(count: usize) -> Tasks {
    Tasks { kind: TaskKind::Forker, ..hogs(count) }
}

impl Tasks {
    /// What they weigh together. One nice level is a quarter more, as in the kernel's table.
    fn weight(&self) -> f64 {
        let one = match self.policy {
            TaskPolicy::Idle => IDLE_WEIGHT,
            TaskPolicy::Normal | TaskPolicy::Batch => UNIT_WEIGHT / 1.25_f64.powi(self.nice),
        };
        one * self.count as f64
    }

    /// The most CPUs that they can use.
    fn demand(&self) -> f64 {
        let one = match self.kind {
            TaskKind::Hog | TaskKind::Forker => 1.0,
            TaskKind::Bursty => BURSTY_CPUS,
        };
        one * self.count as f64
    }

    /// Whether they are to run only when nothing else wants to.
    fn is_idle(&self) -> bool {
        self.policy == TaskPolicy::Idle
    }
}

impl std::fmt::Display for Tasks {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match self.kind {
            TaskKind::Hog => "hogs",
            TaskKind::Bursty => "bursty",
            TaskKind::Forker => "forkers",
        };
        write!(formatter, "{} {kind}", self.count)?;
        match self.policy {
            TaskPolicy::Normal => {}
            TaskPolicy::Batch => write!(formatter, ", SCHED_BATCH")?,
            TaskPolicy::Idle => write!(formatter, ", SCHED_IDLE")?,
        }
        if self.nice != 0 { write!(formatter, ", nice {}", self.nice) } else { Ok(()) }
    }
}

/// What a set of tasks is due.
#[derive(Clone, Debug, PartialEq)]
pub struct Due {
    /// The group they are in, as a path below the root.
    pub group: String,
    /// CPUs.
    pub cpus: f64,
    /// Whether they, or a group they are in, are to run only when nothing else wants to.
    pub is_idle: bool,
}

impl Group {
    fn weight(&self) -> f64 {
        match self.weight {
            GroupWeight::Weight(weight) => UNIT_WEIGHT * f64::from(weight) / 100.0,
            GroupWeight::Idle => IDLE_WEIGHT,
        }
    }

    /// The most CPUs that it can use: what is in it, within its limit and its CPUs.
    fn demand(&self) -> f64 {
        let tasks = self.tasks.iter().map(Tasks::demand);
        let inside: f64 = tasks.chain(self.groups.iter().map(Self::demand)).sum();
        let allowed = self.cpus.as_ref().map_or(f64::INFINITY, |cpus| cpus.len() as f64);
        inside.min(self.limit_cpus.unwrap_or(f64::INFINITY)).min(allowed)
    }

    /// All sets of tasks, with the path of their group, in the order of [`Group::dues`].
    pub fn members(&self) -> Vec<(String, Tasks)> {
        let mut members = Vec::new();
        self.visit("", &mut |path, group| members.extend(group.tasks.iter().map(|tasks| (path.to_string(), *tasks))));
        members
    }

    /// Calls `visitor` for this group and all below it, from the top, with their paths.
    pub fn visit(&self, path: &str, visitor: &mut impl FnMut(&str, &Self)) {
        visitor(path, self);
        for group in &self.groups {
            group.visit(&below(path, &group.name), visitor);
        }
    }

    /// What each set of tasks is due if `cpus` CPUs are there for this tree.
    ///
    /// At each level those who want CPU time share it by weight. What one cannot use, because it has too few tasks or a
    /// limit, goes to the others. That a group is tied to certain CPUs counts as a limit only: this holds if the others
    /// can run everywhere.
    pub fn dues(&self, cpus: f64) -> Vec<Due> {
        let mut dues = Vec::new();
        self.divide("", cpus.min(self.demand()), false, &mut dues);
        dues
    }

    fn divide(&self, path: &str, cpus: f64, is_idle: bool, dues: &mut Vec<Due>) {
        let is_idle = is_idle || self.weight == GroupWeight::Idle;
        let tasks = self.tasks.iter().map(|tasks| (tasks.weight(), tasks.demand()));
        let groups = self.groups.iter().map(|group| (group.weight(), group.demand()));
        let parts = share_out(cpus, &tasks.chain(groups).collect::<Vec<_>>());
        let (to_tasks, to_groups) = parts.split_at(self.tasks.len());
        for (tasks, &cpus) in self.tasks.iter().zip(to_tasks) {
            dues.push(Due { group: path.to_string(), cpus, is_idle: is_idle || tasks.is_idle() });
        }
        for (group, &cpus) in self.groups.iter().zip(to_groups) {
            group.divide(&below(path, &group.name), cpus, is_idle, dues);
        }
    }
}

fn below(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_string() } else { format!("{path}/{name}") }
}

/// Shares `amount` out by weight among those of (weight, demand), nobody getting more than their demand.
fn share_out(amount: f64, wanted: &[(f64, f64)]) -> Vec<f64> {
    let mut parts: Vec<Option<f64>> = vec![None; wanted.len()];
    loop {
        let open = || (0..wanted.len()).filter(|&index| parts[index].is_none());
        let left = (amount - parts.iter().flatten().sum::<f64>()).max(0.0);
        let weights: f64 = open().map(|index| wanted[index].0).sum();
        let part_of = |index: usize| left * wanted[index].0 / weights;
        let sated: Vec<usize> = open().filter(|&index| wanted[index].1 <= part_of(index)).collect();
        if sated.is_empty() {
            return (0..wanted.len()).map(|index| parts[index].unwrap_or_else(|| part_of(index))).collect();
        }
        sated.iter().for_each(|&index| parts[index] = Some(wanted[index].1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_dues(tree: Tree, expected: &[f64]) {
        let dues: Vec<f64> = tree.root().dues(4.0).iter().map(|due| due.cpus).collect();
        assert_eq!(dues.len(), expected.len(), "{tree:?}: {dues:?}");
        for (due, expected) in dues.iter().zip(expected) {
            assert!((due - expected).abs() < 0.005, "{tree:?}: {dues:?}");
        }
    }

    #[test]
    fn weights_count_among_siblings_at_each_level() {
        assert_dues(Tree::Groups, &[0.8, 2.4, 4.0 * 0.2 / 3.0, 4.0 * 0.4 / 3.0]);
    }

    #[test]
    fn what_a_group_cannot_use_goes_to_the_others_by_weight() {
        assert_eq!(share_out(4.0, &[(300.0, 1.0), (100.0, 4.0), (200.0, 4.0)]), [1.0, 1.0, 2.0]);
        assert_eq!(share_out(4.0, &[(1.0, 0.5), (1.0, 1.0)]), [0.5, 1.0]);
    }

    #[test]
    fn a_nice_level_is_a_quarter_of_weight() {
        // The group's two CPUs for 2 × (1 + 0.328 + 3.05) of weight: those of nice −5 would get more than one each.
        let heavy = 2.0 * 3.0518 / (1.0 + 0.32768 + 3.0518);
        assert_dues(Tree::Nice, &[2.0 / 4.3795, 2.0 * 0.32768 / 4.3795, heavy, 2.0]);
    }

    #[test]
    fn a_group_tied_to_cpus_gets_its_weight_if_they_suffice() {
        assert_dues(Tree::Cpuset, &[1.0, 3.0]);
        let mut tree = Tree::Cpuset.root();
        tree.groups[0].weight = GroupWeight::Weight(900);
        let dues: Vec<f64> = tree.dues(4.0).iter().map(|due| due.cpus).collect();
        assert_eq!(dues, [2.0, 2.0]);
    }

    #[test]
    fn what_children_use_is_due_to_their_group() {
        assert_dues(Tree::Forkers, &[1.0, 3.0]);
    }

    #[test]
    fn idle_ones_are_due_next_to_nothing_and_known_as_such() {
        let dues = Tree::Idle.root().dues(4.0);
        let idle: Vec<bool> = dues.iter().map(|due| due.is_idle).collect();
        assert_eq!(idle, [false, false, false, true, true]);
        assert!(dues.iter().all(|due| due.is_idle == (due.cpus < 0.02)), "{dues:?}");
        assert!((dues[0].cpus - dues[1].cpus).abs() < 1e-9, "SCHED_BATCH is as good as normal");
    }

    #[test]
    fn limits_bind_one_inside_another() {
        assert_dues(Tree::Max, &[0.5, 1.5, 0.45, 0.25, 0.5, 0.8]);
    }

    #[test]
    fn the_deep_tree_has_sixty_groups_of_which_none_is_due_too_little_to_be_measured() {
        let dues = Tree::Deep.root().dues(4.0);
        assert_eq!(dues.len(), 60);
        assert!((dues.iter().map(|due| due.cpus).sum::<f64>() - 4.0).abs() < 1e-9);
        assert!(dues.iter().all(|due| due.cpus > 0.01 && due.group.matches('/').count() == 3), "{dues:?}");
    }
}
