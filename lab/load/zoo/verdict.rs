//! What the scheduler took the members for, against what they are.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::cast::Truth;

/// A thread as `scx_stoker threads --json` lists it. One that is not listed is ordinary.
#[derive(Clone, Debug, Deserialize)]
pub struct Listed {
    /// Its identifier.
    pub tid: u64,
    /// That of its process.
    #[serde(default)]
    pub pid: u64,
    /// Its name.
    #[serde(default)]
    pub comm: String,
    /// What it is taken for.
    pub role: ListedRole,
    /// The scheduler's index of the GPU that it is tied to.
    #[serde(default)]
    pub gpu: Option<i64>,
    /// How far from its feeder.
    #[serde(default)]
    pub depth: Option<u32>,
    /// What speaks for it.
    #[serde(default)]
    pub evidence: Vec<String>,
}

/// What the scheduler takes a thread for.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub enum ListedRole {
    /// It feeds a GPU.
    Feeder,
    /// A feeder waits for it.
    Supplier,
    /// It is placed near a GPU, and no more.
    User,
    /// Neither.
    Ordinary,
}

/// A column of the table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Taken for a feeder, of the right GPU if it is one.
    Feeder,
    /// Taken for a feeder of another GPU than it feeds.
    FeederOfAnotherGpu,
    /// Taken for a supplier.
    Supplier,
    /// Taken for neither.
    Ordinary,
}

const VERDICTS: [Verdict; 4] = [Verdict::Feeder, Verdict::FeederOfAnotherGpu, Verdict::Supplier, Verdict::Ordinary];

/// A thread that was judged.
#[derive(Clone, Debug, Serialize)]
pub struct Judged {
    /// How it was made.
    pub kind: &'static str,
    /// Its name.
    pub comm: String,
    /// Its identifier.
    pub tid: u64,
    /// What it is.
    pub truth: Truth,
    /// What it was taken for.
    pub verdict: Verdict,
    /// Whether that is right.
    pub right: bool,
    /// How far from its feeder it was taken to be.
    pub depth: Option<u32>,
    /// Which of the zoo's GPUs it was tied to.
    pub gpu: Option<usize>,
    /// What spoke for it.
    pub evidence: Vec<String>,
}

/// The kind of a thread that the scheduler lists and the zoo did not make.
pub const OUTSIDER: &str = "outside the zoo";

/// Judges a member by what the scheduler says of its thread. `gpus` has the scheduler's index of each of the zoo's GPUs.
/// What comes of it speaks of the zoo's.
pub fn judge(kind: &'static str, comm: &str, tid: u64, truth: Truth, listed: Option<&Listed>, gpus: &[i64]) -> Judged {
    let listed_gpu = listed.and_then(|listed| listed.gpu).and_then(|gpu| gpus.iter().position(|&known| known == gpu));
    let verdict = match (listed.map(|listed| listed.role), truth) {
        (Some(ListedRole::Feeder), Truth::Feeder { gpu }) if listed_gpu != Some(gpu) => Verdict::FeederOfAnotherGpu,
        (Some(ListedRole::Feeder), _) => Verdict::Feeder,
        (Some(ListedRole::Supplier), _) => Verdict::Supplier,
        (Some(ListedRole::User | ListedRole::Ordinary) | None, _) => Verdict::Ordinary,
    };
    let right = match truth {
        Truth::Feeder { .. } => verdict == Verdict::Feeder,
        Truth::Supplier { .. } => verdict == Verdict::Supplier,
        Truth::SupplierAtMost => matches!(verdict, Verdict::Supplier | Verdict::Ordinary),
        Truth::Ordinary => verdict == Verdict::Ordinary,
    };
    Judged {
        kind,
        comm: comm.to_string(),
        tid,
        truth,
        verdict,
        right,
        depth: listed.and_then(|listed| listed.depth),
        gpu: listed_gpu,
        evidence: listed.map(|listed| listed.evidence.clone()).unwrap_or_default(),
    }
}

/// The sums.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Totals {
    /// Threads that feed.
    pub feeders: usize,
    /// ... and were not taken for feeders of their GPU.
    pub missed_feeders: usize,
    /// ... of which were taken for feeders of another one.
    pub wrong_gpu: usize,
    /// Threads that do not feed and were taken for feeders.
    pub false_feeders: usize,
    /// Threads that feeders wait for.
    pub suppliers: usize,
    /// ... and were found.
    pub found_suppliers: usize,
    /// ... at their depth.
    pub suppliers_at_depth: usize,
    /// Ordinary threads that were taken for suppliers.
    pub false_suppliers: usize,
}

impl Totals {
    /// Counts.
    pub fn of(threads: &[Judged]) -> Self {
        let count = |test: &dyn Fn(&Judged) -> bool| threads.iter().filter(|thread| test(thread)).count();
        let feeds = |thread: &Judged| matches!(thread.truth, Truth::Feeder { .. });
        let supplies = |thread: &Judged| matches!(thread.truth, Truth::Supplier { .. });
        let depth = |thread: &Judged| match thread.truth {
            Truth::Supplier { depth } => Some(depth),
            _ => None,
        };
        Self {
            feeders: count(&feeds),
            missed_feeders: count(&|thread| feeds(thread) && !thread.right),
            wrong_gpu: count(&|thread| thread.verdict == Verdict::FeederOfAnotherGpu),
            false_feeders: count(&|thread| !feeds(thread) && thread.verdict == Verdict::Feeder),
            suppliers: count(&supplies),
            found_suppliers: count(&|thread| supplies(thread) && thread.right),
            suppliers_at_depth: count(&|thread| supplies(thread) && thread.right && thread.depth == depth(thread)),
            false_suppliers: count(&|thread| thread.truth == Truth::Ordinary && thread.verdict == Verdict::Supplier),
        }
    }

    /// Share of suppliers that were found, in percent.
    pub fn supplier_recall_percent(&self) -> f64 {
        if self.suppliers == 0 { 100.0 } else { self.found_suppliers as f64 * 100.0 / self.suppliers as f64 }
    }

    /// What is not good enough; nothing if all is.
    pub fn failure(&self) -> Option<String> {
        /// What is asked of suppliers; of feeders, all.
        const WANTED_RECALL_PERCENT: f64 = 95.0;
        let mut failures = Vec::new();
        if self.missed_feeders > 0 {
            failures.push(format!("{} missed feeders", self.missed_feeders));
        }
        if self.false_feeders > 0 {
            failures.push(format!("{} false feeders", self.false_feeders));
        }
        if self.supplier_recall_percent() < WANTED_RECALL_PERCENT {
            failures.push(format!("{} of {} suppliers found", self.found_suppliers, self.suppliers));
        }
        (!failures.is_empty()).then(|| failures.join(", "))
    }
}

/// The name of a true role.
pub fn truth_name(truth: Truth) -> String {
    match truth {
        Truth::Feeder { gpu } => format!("feeder of GPU {gpu}"),
        Truth::Supplier { depth } => format!("supplier, depth {depth}"),
        Truth::SupplierAtMost => "supplier at most".to_string(),
        Truth::Ordinary => "ordinary".to_string(),
    }
}

/// The name of a true role without its particulars, as rows have it.
fn row_role(truth: Truth) -> &'static str {
    match truth {
        Truth::Feeder { .. } => "feeder",
        Truth::Supplier { .. } => "supplier",
        Truth::SupplierAtMost => "supplier at most",
        Truth::Ordinary => "ordinary",
    }
}

/// The confusion table, who was misjudged, and the totals, for people.
pub fn report(threads: &[Judged]) -> String {
    let mut rows: Vec<(&str, &str)> = Vec::new();
    let mut counts: BTreeMap<(&str, &str), [usize; 4]> = BTreeMap::new();
    let mut wrong: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for thread in threads {
        let row = (row_role(thread.truth), thread.kind);
        if !rows.contains(&row) {
            rows.push(row);
        }
        let column = VERDICTS.iter().position(|&verdict| verdict == thread.verdict).unwrap_or_default();
        counts.entry(row).or_default()[column] += 1;
        *wrong.entry(row).or_default() += usize::from(!thread.right);
    }
    let width = rows.iter().map(|(_, kind)| kind.chars().count()).max().unwrap_or(0);
    let mut text = format!(
        "{:<16}  {:<width$}  {:>7}  {:>6}  {:>9}  {:>8}  {:>8}\n",
        "is", "made as", "threads", "feeder", "wrong GPU", "supplier", "ordinary"
    );
    for row in rows {
        let row_counts = counts.get(&row).copied().unwrap_or_default();
        let cell = |count: usize| if count == 0 { "·".to_string() } else { count.to_string() };
        let [feeder, other, supplier, ordinary] = row_counts.map(cell);
        let mark = match wrong.get(&row) {
            None | Some(0) => String::new(),
            Some(wrong) => format!("  {wrong} wrong"),
        };
        text += &format!(
            "{:<16}  {:<width$}  {:>7}  {feeder:>6}  {other:>9}  {supplier:>8}  {ordinary:>8}{mark}\n",
            row.0,
            row.1,
            row_counts.iter().sum::<usize>(),
        );
    }
    let misjudged: Vec<&Judged> = threads.iter().filter(|thread| !thread.right).collect();
    if !misjudged.is_empty() {
        text += "\nmisjudged:\n";
    }
    for thread in misjudged {
        let taken_for = match thread.verdict {
            Verdict::Feeder | Verdict::FeederOfAnotherGpu => {
                thread.gpu.map_or("feeder of no GPU of the zoo".to_string(), |gpu| format!("feeder of GPU {gpu}"))
            }
            Verdict::Supplier => "supplier".to_string(),
            Verdict::Ordinary => "ordinary".to_string(),
        };
        let evidence = if thread.evidence.is_empty() { "none".to_string() } else { thread.evidence.join(", ") };
        text += &format!(
            "  {:<15}  {:>7}  is {}, taken for {taken_for}; evidence: {evidence}\n",
            thread.comm,
            thread.tid,
            truth_name(thread.truth)
        );
    }
    let totals = Totals::of(threads);
    text += &format!(
        "\nfalse feeders {}, missed feeders {} of {} (wrong GPU {}), suppliers found {} of {} ({:.0} %), \
         at their depth {}, false suppliers {}\n",
        totals.false_feeders,
        totals.missed_feeders,
        totals.feeders,
        totals.wrong_gpu,
        totals.found_suppliers,
        totals.suppliers,
        totals.supplier_recall_percent(),
        totals.suppliers_at_depth,
        totals.false_suppliers,
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread of `truth` that the scheduler lists as `json`, or not at all; the zoo's GPUs 0 and 1 are its 1 and 0.
    fn judged(truth: Truth, json: Option<&str>) -> Judged {
        let listed: Option<Listed> = json.map(|json| serde_json::from_str(json).unwrap());
        judge("a kind", "name", 5, truth, listed.as_ref(), &[1, 0])
    }

    const FEEDER_OF_1: &str =
        r#"{"tid":5,"pid":5,"comm":"x","role":"feeder","gpu":1,"gpus":[1],"depth":0,"evidence":["ioctl"]}"#;
    const SUPPLIER: &str = r#"{"tid":5,"role":"supplier","gpu":null,"depth":2,"evidence":["wake"]}"#;
    const USER: &str = r#"{"tid":5,"role":"user"}"#;

    #[test]
    fn a_feeder_of_another_gpu_is_missed() {
        let right = judged(Truth::Feeder { gpu: 0 }, Some(FEEDER_OF_1));
        let wrong = judged(Truth::Feeder { gpu: 1 }, Some(FEEDER_OF_1));
        assert_eq!((right.verdict, wrong.verdict), (Verdict::Feeder, Verdict::FeederOfAnotherGpu));
        let totals = Totals::of(&[right, wrong]);
        assert_eq!((totals.feeders, totals.missed_feeders, totals.wrong_gpu), (2, 1, 1));
        assert_eq!(totals.failure().as_deref(), Some("1 missed feeders"));
    }

    #[test]
    fn whoever_is_not_listed_or_only_placed_is_ordinary() {
        assert!(judged(Truth::Ordinary, None).right);
        assert!(judged(Truth::Ordinary, Some(USER)).right);
        assert!(!judged(Truth::Feeder { gpu: 0 }, None).right);
        assert!(!judged(Truth::Supplier { depth: 1 }, Some(USER)).right);
    }

    #[test]
    fn a_pool_thread_may_be_a_supplier_and_never_a_feeder() {
        assert!(judged(Truth::SupplierAtMost, None).right);
        assert!(judged(Truth::SupplierAtMost, Some(SUPPLIER)).right);
        let false_feeder = judged(Truth::SupplierAtMost, Some(FEEDER_OF_1));
        assert_eq!(Totals::of(&[false_feeder]).failure().as_deref(), Some("1 false feeders"));
    }

    #[test]
    fn one_missed_supplier_of_twenty_is_good_enough_and_two_are_not() {
        let mut threads = vec![judged(Truth::Supplier { depth: 2 }, Some(SUPPLIER)); 19];
        threads.push(judged(Truth::Supplier { depth: 1 }, None));
        let totals = Totals::of(&threads);
        assert_eq!((totals.failure(), totals.suppliers_at_depth), (None, 19));
        threads[0] = judged(Truth::Supplier { depth: 2 }, None);
        assert!(Totals::of(&threads).failure().is_some());
    }

    #[test]
    fn the_report_names_the_misjudged_with_their_evidence() {
        let text = report(&[judged(Truth::Ordinary, Some(FEEDER_OF_1)), judged(Truth::Ordinary, None)]);
        assert!(text.contains("is ordinary, taken for feeder of GPU 0; evidence: ioctl"), "{text}");
        assert!(text.contains("false feeders 1, missed feeders 0 of 0"), "{text}");
    }
}
