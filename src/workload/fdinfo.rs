//! What DRM drivers say in /proc/PID/fdinfo/FD of the work that went through an open file: counters for each of the
//! GPU's engines. The format is described in the kernel's documentation, `gpu/drm-usage-stats`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::BufRead;

/// One open DRM file, which several descriptors and processes may share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// `drm-driver`.
    pub driver: String,
    /// `drm-client-id`: tells it from all others of its GPU.
    pub id: u64,
    /// What each engine did for it since it was opened, in nanoseconds or cycles. Empty where the driver counts
    /// neither.
    pub engines: BTreeMap<String, u64>,
}

/// Reads the text of an fdinfo file; none if it is not of a DRM client.
pub fn parse(text: impl BufRead) -> Option<Client> {
    let (mut driver, mut id, mut engines) = (String::new(), None, BTreeMap::new());
    for line in text.lines() {
        let line = line.ok()?;
        let Some((key, value)) = line.split_once(':') else { continue };
        let value = value.trim();
        // Without its unit.
        let number = || value.split_whitespace().next()?.parse::<u64>().ok();
        match key {
            "drm-driver" => driver = value.to_string(),
            "drm-client-id" => id = number(),
            // Not drm-total-cycles: that is how far an engine would have come without a pause.
            _ if key.starts_with("drm-engine-capacity-") => {}
            _ if key.starts_with("drm-engine-") || key.starts_with("drm-cycles-") => {
                if let Some(number) = number() {
                    engines.insert(key.to_string(), number);
                }
            }
            _ => {}
        }
    }
    Some(Client { driver, id: id?, engines })
}

/// One GPU file that a process holds open: the GPUs that it belongs to, as bits, and its DRM client, if it is one.
pub type OpenFile = (u64, Option<Client>);

/// The drivers that were seen to count. Others show counters too, and leave them at 0 unless someone turns them on.
#[derive(Debug, Default)]
pub struct CountingDrivers(BTreeSet<String>);

/// What the engines had done for one process at the last look.
#[derive(Debug, Default)]
pub struct Engines(Option<BTreeMap<(u64, u64), BTreeMap<String, u64>>>);

impl Engines {
    /// Takes in all GPU files that the process holds. Returns two sets of GPUs as bits: those of which counters tell
    /// whether they work for it, and those that did since the last look.
    ///
    /// Counters tell of a GPU only if all its files that the process holds have some: what is submitted through
    /// another, such as /dev/kfd, is not in them.
    pub fn look(&mut self, files: &[OpenFile], drivers: &mut CountingDrivers) -> (u64, u64) {
        let (mut counted, mut uncounted, mut worked) = (0, 0, 0);
        let mut now = BTreeMap::new();
        for (gpus, client) in files {
            let Some(client) = client.as_ref().filter(|client| !client.engines.is_empty()) else {
                uncounted |= gpus;
                continue;
            };
            if client.engines.values().any(|&count| count > 0) {
                drivers.0.insert(client.driver.clone());
            }
            counted |= gpus;
            // A descriptor that was duplicated is the same client, and takes the same place here.
            let key = (*gpus, client.id);
            if let Some(before) = &self.0 {
                let before = before.get(&key);
                // A counter that fell has begun anew; one that is new has begun at 0.
                let advances = |(engine, &count): (&String, &u64)| {
                    count > before.and_then(|before| before.get(engine)).copied().unwrap_or(0)
                };
                worked |= if client.engines.iter().any(advances) { *gpus } else { 0 };
            }
            now.insert(key, client.engines.clone());
        }
        let silent = files.iter().filter_map(|(gpus, client)| Some((gpus, client.as_ref()?)));
        let silent = silent.filter(|(_, client)| !drivers.0.contains(&client.driver));
        uncounted |= silent.fold(0, |all, (gpus, _)| all | gpus);
        self.0 = Some(now);
        (counted & !uncounted, worked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AMDGPU: &str = "pos:\t0\nflags:\t02100002\nmnt_id:\t27\nino:\t613\ndrm-driver:\tamdgpu\ndrm-client-id:\t42\n\
                          drm-pdev:\t0000:03:00.0\npasid:\t32771\ndrm-total-vram:\t8192 KiB\n\
                          drm-engine-gfx:\t123456 ns\ndrm-engine-compute:\t7 ns\ndrm-engine-capacity-compute:\t4\n";
    const XE: &str = "drm-driver:\txe\ndrm-client-id:\t9\ndrm-pdev:\t0000:03:00.0\ndrm-cycles-ccs:\t81\n\
                      drm-total-cycles-ccs:\t7655183225\ndrm-engine-capacity-ccs:\t4\n";

    fn client(driver: &str, id: u64, engines: &[(&str, u64)]) -> Option<Client> {
        let engines = engines.iter().map(|(engine, count)| (engine.to_string(), *count)).collect();
        Some(Client { driver: driver.into(), id, engines })
    }

    #[test]
    fn busy_time_and_cycles_are_counters_and_capacities_and_total_cycles_are_none() {
        let amdgpu = client("amdgpu", 42, &[("drm-engine-gfx", 123_456), ("drm-engine-compute", 7)]);
        assert_eq!(parse(AMDGPU.as_bytes()), amdgpu);
        assert_eq!(parse(XE.as_bytes()), client("xe", 9, &[("drm-cycles-ccs", 81)]));
    }

    #[test]
    fn a_file_that_is_no_drm_client_says_nothing_and_nonsense_is_no_counter() {
        assert_eq!(parse("pos:\t0\nflags:\t02\nmnt_id:\t27\n".as_bytes()), None);
        let text = "drm-driver:\tx\ndrm-client-id:\t1\ndrm-engine-gfx:\tlots\ndrm-engine-vcn: -5 ns\ndrm-engine-\n";
        assert_eq!(parse(text.as_bytes()), client("x", 1, &[]));
    }

    #[test]
    fn work_is_what_is_added_between_two_looks() {
        let (mut engines, mut drivers) = (Engines::default(), CountingDrivers::default());
        let at = |gfx| vec![(0b1, client("amdgpu", 1, &[("gfx", gfx)])), (0b10, client("amdgpu", 1, &[("gfx", 0)]))];
        assert_eq!(engines.look(&at(500), &mut drivers), (0b11, 0), "what it did before the first look is past");
        assert_eq!(engines.look(&at(600), &mut drivers), (0b11, 0b1));
        assert_eq!(engines.look(&at(600), &mut drivers), (0b11, 0));
    }

    #[test]
    fn a_counter_that_goes_backwards_is_a_new_beginning() {
        let (mut engines, mut drivers) = (Engines::default(), CountingDrivers::default());
        let mut worked = |gfx| engines.look(&[(1, client("i915", 1, &[("gfx", gfx)]))], &mut drivers).1;
        assert_eq!([worked(500), worked(400), worked(400), worked(450)], [0, 0, 0, 1]);
    }

    #[test]
    fn a_client_that_came_after_the_first_look_has_done_all_it_counts_since_then() {
        let (mut engines, mut drivers) = (Engines::default(), CountingDrivers::default());
        engines.look(&[(1, client("i915", 1, &[("gfx", 500)]))], &mut drivers);
        let later = [(1, client("i915", 1, &[("gfx", 500)])), (1, client("i915", 2, &[("gfx", 3)]))];
        assert_eq!(engines.look(&later, &mut drivers), (1, 1));
    }

    #[test]
    fn counters_say_nothing_of_a_gpu_that_is_used_through_another_file_as_well() {
        let (mut engines, mut drivers) = (Engines::default(), CountingDrivers::default());
        let counted = (0b10, client("amdgpu", 1, &[("gfx", 5)]));
        let kfd = (0b11, None);
        assert_eq!(engines.look(&[counted.clone(), kfd], &mut drivers).0, 0);
        assert_eq!(engines.look(&[counted.clone(), (0b1, None)], &mut drivers).0, 0b10);
        assert_eq!(engines.look(&[counted, (0b10, client("amdgpu", 2, &[]))], &mut drivers).0, 0);
    }

    #[test]
    fn counters_at_zero_say_nothing_until_their_driver_is_seen_to_count() {
        let (mut engines, mut drivers) = (Engines::default(), CountingDrivers::default());
        let zero = [(1, client("panfrost", 1, &[("gfx", 0)]))];
        assert_eq!(engines.look(&zero, &mut drivers).0, 0);
        let other = [(2, client("panfrost", 1, &[("gfx", 1)]))];
        Engines::default().look(&other, &mut drivers);
        assert_eq!(engines.look(&zero, &mut drivers).0, 1);
    }
}
