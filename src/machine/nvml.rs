//! Asks NVML, on one thread: calling it from several at once has crashed machines, and a call may hang for as long
//! as the driver does.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::InitFlags;
use nvml_wrapper::error::NvmlError;

use super::MigInstance;
use super::cpuset::CpuSet;
use super::home::NvmlPlace;
use super::pci::PciAddress;

/// The name under which the driver installs NVML.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// 64-bit words to offer for an affinity mask: 8192 CPUs, the most that Linux can be built for on any machine.
const AFFINITY_WORDS: usize = 128;

/// `NVML_AFFINITY_SCOPE_NODE`.
const SCOPE_NODE: u32 = 0;

/// Which NVML to ask.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum NvmlSource {
    /// None.
    Off,
    /// The one that the driver installed, if it did.
    #[default]
    Auto,
    /// The library at this path.
    Library(PathBuf),
}

/// Whether an NVML thread lives. There is one at most.
static ALIVE: AtomicBool = AtomicBool::new(false);

/// Held by the thread for as long as it lives.
struct Alive {
    /// Its other end learns of the thread's end.
    _ended: Sender<()>,
}

impl Drop for Alive {
    fn drop(&mut self) {
        ALIVE.store(false, Ordering::Release);
    }
}

type Question = Box<dyn FnOnce(&Nvml) + Send>;

/// The only thread that calls NVML; a second cannot be started while it lives. It ends when this is dropped and no call hangs.
#[derive(Debug)]
pub struct NvmlThread {
    questions: Sender<Question>,
    /// Questions that NVML has not answered, whether or not anybody still waits.
    open: Arc<AtomicUsize>,
    /// Says nothing; its other end goes away when the thread has ended.
    ended: Receiver<()>,
}

/// Why there is no NVML.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Absent {
    /// It is not installed, or was not to be used.
    NotThere,
    /// It is there and does not work.
    Broken(String),
}

/// A question got no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoAnswer;

impl NvmlThread {
    /// Loads and initialises NVML.
    ///
    /// # Errors
    /// [`Absent`] tells whether a person needs to know. Taking longer than `timeout` is [`Absent::Broken`].
    pub fn start(source: &NvmlSource, timeout: Duration) -> Result<Self, Absent> {
        let library: OsString = match source {
            NvmlSource::Off => return Err(Absent::NotThere),
            NvmlSource::Auto => LIBRARY.into(),
            NvmlSource::Library(path) => path.into(),
        };
        if ALIVE.swap(true, Ordering::AcqRel) {
            return Err(Absent::Broken("it is in use already, or a call from before still hangs".into()));
        }
        let (questions, inbox) = channel::<Question>();
        let (started, start) = channel();
        let (alive, ended) = channel::<()>();
        // Made here, so that it goes away even if the thread cannot be started.
        let alive = Alive { _ended: alive };
        let thread = move || {
            let _alive = alive;
            // A driver with no GPU yet is no error: one may come.
            let nvml = match Nvml::builder().lib_path(&library).flags(InitFlags::NO_GPUS).init() {
                Ok(nvml) => nvml,
                Err(error) => {
                    let _ = started.send(Err(error));
                    return;
                }
            };
            let _ = started.send(Ok(()));
            inbox.into_iter().for_each(|question| question(&nvml));
        };
        std::thread::Builder::new()
            .name("nvml".into())
            .spawn(thread)
            .map_err(|error| Absent::Broken(format!("its thread could not be started: {error}")))?;
        match start.recv_timeout(timeout) {
            Ok(Ok(())) => Ok(Self { questions, open: Arc::default(), ended }),
            Ok(Err(NvmlError::LibloadingError(_) | NvmlError::LibraryNotFound)) if *source == NvmlSource::Auto => {
                Err(Absent::NotThere)
            }
            Ok(Err(error)) => Err(Absent::Broken(explain(&error))),
            Err(_) => Err(Absent::Broken(format!("it did not start within {} s", timeout.as_secs_f32()))),
        }
    }

    /// Runs `question` on NVML's thread and waits for its answer, at most for `timeout`.
    ///
    /// # Errors
    /// [`NoAnswer`] after `timeout`; then this question or an earlier one hangs, and later ones wait behind it.
    pub fn ask<T: Send + 'static>(
        &self,
        timeout: Duration,
        question: impl FnOnce(&Nvml) -> T + Send + 'static,
    ) -> Result<T, NoAnswer> {
        let (reply, answer) = channel();
        let open = Arc::clone(&self.open);
        let question = Box::new(move |nvml: &Nvml| {
            let answer = question(nvml);
            open.fetch_sub(1, Ordering::AcqRel);
            // Whoever asked may have given up.
            let _ = reply.send(answer);
        });
        self.open.fetch_add(1, Ordering::AcqRel);
        self.questions.send(question).map_err(|_| NoAnswer)?;
        answer.recv_timeout(timeout).map_err(|_| NoAnswer)
    }

    /// Whether a question from before still hangs in NVML, so that whoever asks now would wait behind it. There is no
    /// way to end such a call, and another thread must not call NVML beside it.
    pub fn is_stuck(&self) -> bool {
        self.open.load(Ordering::Acquire) != 0
    }
}

impl Drop for NvmlThread {
    fn drop(&mut self) {
        // Ends the thread's loop. Waiting keeps a next NVML thread from overlapping with this one; a hung call is
        // left to the driver.
        self.questions = channel().0;
        if self.ended.recv_timeout(Duration::from_millis(500)) == Err(RecvTimeoutError::Timeout) {
            log::warn!("NVML hangs in a call and was left alone; it cannot be asked again until that call returns");
        }
    }
}

/// NVML's words for an error, with a full sentence for those that people meet.
pub(crate) fn explain(error: &NvmlError) -> String {
    match error {
        NvmlError::DriverNotLoaded => "the NVIDIA driver is not loaded".into(),
        NvmlError::LibRmVersionMismatch => {
            "the driver and its library are of different versions; reload the driver or reboot".into()
        }
        other => other.to_string(),
    }
}

/// What NVML says about one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NvmlGpu {
    /// PCI address.
    pub pci: Option<PciAddress>,
    /// UUID.
    pub uuid: Option<String>,
    /// Name.
    pub name: Option<String>,
    /// Number of its device file.
    pub minor: Option<u32>,
    /// Affinities.
    pub place: NvmlPlace,
    /// Whether MIG is on.
    pub mig: bool,
    /// Its MIG instances.
    pub mig_instances: Vec<MigInstance>,
}

/// What NVML says about all GPUs.
#[derive(Clone, Debug, Default)]
pub(super) struct NvmlGpus {
    /// Those it could describe.
    pub gpus: Vec<NvmlGpu>,
    /// What went wrong with the others.
    pub faults: Vec<String>,
}

/// Describes every GPU that NVML knows. An error with one of them leaves all others intact, and so does a hang that
/// ends within another `timeout`; one that does not leaves those before it intact.
pub(super) fn gpus(nvml: &NvmlThread, timeout: Duration) -> NvmlGpus {
    let mut found = NvmlGpus::default();
    let hung = |what: String| format!("NVML did not answer within {} s when asked for {what}", timeout.as_secs_f32());
    let count = match nvml.ask(timeout, Nvml::device_count) {
        Ok(Ok(count)) => count,
        Ok(Err(error)) => {
            found.faults.push(format!("NVML could not count its GPUs: {}", explain(&error)));
            return found;
        }
        Err(NoAnswer) => {
            found.faults.push(hung("the number of GPUs".into()));
            return found;
        }
    };
    for index in 0..count {
        match nvml.ask(timeout, move |nvml| describe(nvml, index)) {
            Ok(Ok(gpu)) => found.gpus.push(gpu),
            Ok(Err(error)) => {
                found.faults.push(format!("NVML could not describe its GPU {index}: {}", explain(&error)));
            }
            Err(NoAnswer) => {
                found.faults.push(hung(format!("its GPU {index}")));
                // Nobody may be asked while that call has not come back.
                if index + 1 < count && nvml.ask(timeout, |_| ()).is_err() {
                    found
                        .faults
                        .push(format!("NVML still hangs, so its GPUs from {} on were not asked for", index + 1));
                    break;
                }
            }
        }
    }
    found
}

fn describe(nvml: &Nvml, index: u32) -> Result<NvmlGpu, NvmlError> {
    let device = nvml.device_by_index(index)?;
    // Without an address, nothing else could be matched to a GPU.
    let pci = device.pci_info()?.bus_id.parse().ok();
    // Everything below is a detail that some GPU or driver does not offer.
    let words = |words: Vec<std::ffi::c_ulong>| CpuSet::from_words(words);
    let near = device.cpu_affinity_within_scope(AFFINITY_WORDS, SCOPE_NODE).map(words).unwrap_or_default();
    let cpus = match near.is_empty() {
        true => device.cpu_affinity(AFFINITY_WORDS).map(words).unwrap_or_default(),
        false => near,
    };
    let nodes = device.memory_affinity(AFFINITY_WORDS, SCOPE_NODE).map(words).unwrap_or_default();
    let mig = device.mig_mode().is_ok_and(|mode| mode.current != 0);
    let slots = if mig { device.mig_device_count().unwrap_or(0) } else { 0 };
    let mig_instances = (0..slots)
        .filter_map(|slot| {
            let instance = device.mig_device_by_index(slot).ok()?;
            Some(MigInstance { uuid: instance.uuid().ok()?, name: instance.name().ok() })
        })
        .collect();
    Ok(NvmlGpu {
        pci,
        uuid: device.uuid().ok(),
        name: device.name().ok(),
        minor: device.minor_number().ok(),
        place: NvmlPlace { cpus, nodes },
        mig,
        mig_instances,
    })
}
