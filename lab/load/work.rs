//! The unit of work: a fixed number of instructions, so that work done under two schedulers can be compared.

use std::cell::Cell;

use crate::sys::now_ns;

/// Instructions in one unit. The counted lab executes one instruction per nanosecond, so a unit is 10 µs there.
const UNIT_INSTRUCTIONS: u64 = 10_000;

/// Work units in a millisecond of an undisturbed CPU in the counted lab.
pub const UNITS_PER_MS: u64 = 1_000_000 / UNIT_INSTRUCTIONS;

/// Units of work of a thread between two hints to the processor that it waits. They are nothing to a real one. In the counted
/// lab, where CPUs take turns, each ends its CPU's turn: one that computes to the end of its turn leaves the next one none
/// (see docs/lab.md), and one that gave its turn up more often than others would get less done in the same CPU time.
const UNITS_PER_PAUSE: u64 = 7;

thread_local! {
    static DONE: Cell<u64> = const { Cell::new(0) };
}

/// Does `units` units of work: arithmetic only, and no system call.
pub fn work(units: u64) {
    let done = DONE.get();
    for unit in done..done + units {
        one_unit();
        if unit % UNITS_PER_PAUSE == 0 {
            std::hint::spin_loop();
        }
    }
    DONE.set(done + units);
}

/// How many CPUs' work is done at once when all `cpus` are busy: all of them, but 1 in the counted lab, where they take turns.
/// Finds out, which takes some tens of milliseconds on an idle machine.
pub fn at_once(cpus: usize) -> f64 {
    /// One of them will not be disturbed.
    const TRIES: usize = 3;
    const UNITS: u64 = 5 * UNITS_PER_MS;
    let soonest_ns = |cpus: usize| {
        let once_ns = || {
            let start_ns = now_ns();
            std::thread::scope(|scope| {
                (0..cpus).for_each(|_| {
                    scope.spawn(|| work(UNITS));
                });
            });
            now_ns() - start_ns
        };
        (0..TRIES).map(|_| once_ns()).min().unwrap_or(1) as f64
    };
    (soonest_ns(1) * cpus as f64 / soonest_ns(cpus)).round().clamp(1.0, cpus as f64)
}

/// Whole units in `us` microseconds of work, at least one unless `us` is zero.
pub fn units_of_us(us: u64) -> u64 {
    if us == 0 { 0 } else { (us * UNITS_PER_MS / 1000).max(1) }
}

/// 100 rounds of 100 instructions. They are no-ops because an emulated CPU runs those many times faster than
/// arithmetic, while its instruction count, which is the guest's clock, cannot tell them apart.
#[cfg(target_arch = "x86_64")]
fn one_unit() {
    // SAFETY: the assembly touches one register, declared as clobbered, and the flags.
    unsafe {
        std::arch::asm!(
            "2:",
            ".rept 98",
            "nop",
            ".endr",
            "dec {rounds}",
            "jnz 2b",
            rounds = inout(reg) UNIT_INSTRUCTIONS / 100 => _,
            options(nomem, nostack)
        );
    }
}

/// About as many instructions wherever there is no hand-written loop.
#[cfg(not(target_arch = "x86_64"))]
fn one_unit() {
    for round in 0..UNIT_INSTRUCTIONS / 4 {
        std::hint::black_box(round);
    }
}

/// A deterministic pseudo-random sequence (xorshift64), so that every run of a neighbour is the same.
pub struct Sequence(u64);

impl Sequence {
    /// The sequence number `index`; neighbours of different index differ.
    pub fn new(index: usize) -> Self {
        Self((index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// The next number in `low..=high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        low + self.0 % (high - low + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_millisecond_is_a_hundred_units() {
        assert_eq!(units_of_us(1000), UNITS_PER_MS);
        assert_eq!(units_of_us(1), 1);
        assert_eq!(units_of_us(0), 0);
    }

    #[test]
    fn sequences_stay_in_range_and_repeat() {
        let draw = |index| {
            let mut sequence = Sequence::new(index);
            (0..100).map(|_| sequence.between(20, 100)).collect::<Vec<_>>()
        };
        assert!(draw(3).iter().all(|n| (20..=100).contains(n)));
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
    }
}
