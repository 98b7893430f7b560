//! What must hold on every kernel: it loads, feeds and unloads. `scripts/test` runs these on the oldest one, too.

use crate::guest::{lab, state};
use crate::home::HOMES;
use crate::load;
use crate::stoker::Stoker;
use crate::weights::{assert_limits_hold, measured};

#[test]
fn it_loads_keeps_feeders_at_home_and_unloads() {
    let _lab = lab();
    let stoker = Stoker::start(&[]);
    load::feed("--hogs 8 --start-on other-node --warmup-s 0.5 --seconds 2").assert_served(&HOMES);
    let spinning = "--submit doorbell --wait spin --hogs 8 --start-on other-node --warmup-s 0.5 --seconds 2";
    load::feed(spinning).assert_served(&HOMES);
    stoker.stop();
    assert_eq!(state(), "disabled");
    assert_eq!(load::feed("--hogs 4 --warmup-s 0.1 --seconds 0.5").scheduler, "kernel");
}

#[test]
fn limits_that_groups_get_while_it_runs_hold_within_a_second() {
    let _lab = lab();
    let stoker = Stoker::start(&[]);
    let trees = measured("max,idle", "1.5");
    stoker.stop();
    assert_limits_hold(&trees[0], &trees[1]);
}
