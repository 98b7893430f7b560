//! The tasks beside the feeders: hogs, bursty ones and forkers compete with them, loaders supply them.

use std::io::{PipeWriter, Write};
use std::sync::atomic::Ordering::Relaxed;

use anyhow::Result;

use crate::shared::{Control, Slot, Window};
use crate::sys::{in_child, now_ns, sleep_until};
use crate::work::{Sequence, UNITS_PER_MS, work};

/// Units between two looks at the clock: 0.1 ms of work.
const LOOK_UNITS: u64 = UNITS_PER_MS / 10;

/// Computes without a pause.
pub fn hog(control: &Control, slot: &Slot) {
    let window = control.ready_and_wait();
    loop {
        work(LOOK_UNITS);
        let now = now_ns();
        slot.note_seen(now, window);
        if window.holds(now) {
            slot.units.fetch_add(LOOK_UNITS, Relaxed);
        } else if now >= window.end_ns {
            return;
        }
    }
}

/// Computes for 0.2 to 1 ms of work, then sleeps for 0.5 to 2 ms, again and again.
pub fn bursty(control: &Control, slot: &Slot, index: usize) {
    let mut sequence = Sequence::new(index);
    let window = control.ready_and_wait();
    loop {
        let units = sequence.between(UNITS_PER_MS / 5, UNITS_PER_MS);
        work(units);
        let now = now_ns();
        note_run(slot, units, now, window);
        if now >= window.end_ns {
            return;
        }
        sleep_until(now + sequence.between(500_000, 2_000_000));
    }
}

/// Has a child compute for 2 ms of work, again and again.
pub fn forker(control: &Control, slot: &Slot) -> Result<()> {
    const UNITS: u64 = 2 * UNITS_PER_MS;
    let window = control.ready_and_wait();
    while now_ns() < window.end_ns {
        in_child(|| {
            work(UNITS);
            note_run(slot, UNITS, now_ns(), window);
        })?;
    }
    Ok(())
}

/// Counts a run of `units` units of work that ended at `now`, if that counts.
fn note_run(slot: &Slot, units: u64, now: u64, window: Window) {
    slot.note_seen(now, window);
    if window.holds(now) {
        slot.units.fetch_add(units, Relaxed);
        slot.steps.fetch_add(1, Relaxed);
    }
}

/// Bytes in a batch: a page, because a pipe of two pages then holds two batches, and atomic to write.
pub const BATCH_BYTES: usize = 4096;

/// Batches a loader may be ahead of its feeder.
pub const PREFETCH: usize = 2;

/// Produces batches of `units` units of work each into `pipe` until the feeder is gone or the run is over.
pub fn loader(control: &Control, slot: &Slot, units: u64, mut pipe: PipeWriter) -> Result<()> {
    let window = control.ready_and_wait();
    let batch = [1; BATCH_BYTES];
    loop {
        work(units);
        let now = now_ns();
        note_run(slot, units, now, window);
        if now >= window.end_ns {
            return Ok(());
        }
        match pipe.write_all(&batch) {
            // The feeder ends first when the run is over.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
            other => other?,
        }
    }
}
