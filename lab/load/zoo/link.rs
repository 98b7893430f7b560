//! How a batch gets from the thread that makes it to the one that waits for it. It is made when it is asked for, so
//! that the asker does wait: a batch that lies ready is nothing that anybody waits for.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use anyhow::Result;

use crate::neighbours::BATCH_BYTES;
use crate::shared::map_shared;
use crate::sys::{check, futex_wait, futex_wake, now_ns};

/// What carries requests and batches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LinkKind {
    /// Two pipes between processes
    Pipe,
    /// A stream socket pair between processes
    Socket,
    /// Private futexes between threads of a process
    Futex,
    /// Memory shared between processes, and futexes in it
    SharedMemory,
}

impl LinkKind {
    /// Both ends of a new link. Made before the fork that parts them.
    pub fn pair(self) -> Result<(Asker, Maker)> {
        let private = self == Self::Futex;
        Ok(match self {
            Self::Pipe => {
                let (requests_out, requests) = std::io::pipe()?;
                let (batches, batches_in) = std::io::pipe()?;
                (
                    Asker::Files(File::from(OwnedFd::from(requests)), File::from(OwnedFd::from(batches))),
                    Maker::Files(File::from(OwnedFd::from(requests_out)), File::from(OwnedFd::from(batches_in))),
                )
            }
            Self::Socket => {
                let (asker, maker) = UnixStream::pair()?;
                let files = |stream: UnixStream| -> io::Result<(File, File)> {
                    Ok((File::from(OwnedFd::from(stream.try_clone()?)), File::from(OwnedFd::from(stream))))
                };
                let ((requests, batches), (requests_out, batches_in)) = (files(asker)?, files(maker)?);
                (Asker::Files(requests, batches), Maker::Files(requests_out, batches_in))
            }
            Self::Futex | Self::SharedMemory => {
                let page = map_shared(size_of::<Mailbox>())?;
                // SAFETY: the mapping is zeroed, page-aligned, large enough and never unmapped; zeros are a mailbox.
                let mailbox: &'static Mailbox = unsafe { &*page.cast::<Mailbox>() };
                (Asker::Memory(mailbox, private), Maker::Memory(mailbox, private))
            }
        })
    }
}

/// Two counts to wait on.
pub struct Mailbox {
    asked: AtomicU32,
    made: AtomicU32,
}

/// The end that waits for batches.
pub enum Asker {
    /// Where requests go and where batches come from.
    Files(File, File),
    /// A mailbox, and whether it is private to the process.
    Memory(&'static Mailbox, bool),
}

impl Asker {
    /// Asks for a batch and waits for it.
    pub fn ask(&mut self) -> Result<()> {
        match self {
            Self::Files(requests, batches) => {
                requests.write_all(&[1])?;
                batches.read_exact(&mut [0; BATCH_BYTES])?;
            }
            Self::Memory(mailbox, private) => {
                put(&mailbox.asked, *private);
                take(&mailbox.made, *private);
            }
        }
        Ok(())
    }
}

/// The end that makes batches.
pub enum Maker {
    /// Where requests come from and where batches go.
    Files(File, File),
    /// A mailbox, and whether it is private to the process.
    Memory(&'static Mailbox, bool),
}

impl Maker {
    /// Waits for a request, makes a batch with `make` and hands it over.
    pub fn serve(&mut self, make: impl FnOnce() -> Result<()>) -> Result<()> {
        match self {
            Self::Files(requests, batches) => {
                requests.read_exact(&mut [0])?;
                make()?;
                batches.write_all(&[1; BATCH_BYTES])?;
            }
            Self::Memory(mailbox, private) => {
                take(&mailbox.asked, *private);
                make()?;
                put(&mailbox.made, *private);
            }
        }
        Ok(())
    }
}

/// Adds one to a count and wakes who waits for it.
fn put(count: &AtomicU32, private: bool) {
    count.fetch_add(1, SeqCst);
    futex_wake(count, 1, private);
}

/// Takes one off a count, as soon as there is one.
fn take(count: &AtomicU32, private: bool) {
    loop {
        let there = count.load(SeqCst);
        if there == 0 {
            futex_wait(count, 0, private);
        } else if count.compare_exchange(there, there - 1, SeqCst, SeqCst).is_ok() {
            return;
        }
    }
}

/// Waits until one of `files` can be read or CLOCK_MONOTONIC reads `deadline_ns`; tells for each whether it can.
pub fn wait_readable(files: &[RawFd], deadline_ns: Option<u64>) -> io::Result<Vec<bool>> {
    let mut polled: Vec<libc::pollfd> =
        files.iter().map(|&fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
    let left = deadline_ns.map(|deadline_ns| {
        let ns = deadline_ns.saturating_sub(now_ns());
        libc::timespec { tv_sec: (ns / 1_000_000_000) as libc::time_t, tv_nsec: (ns % 1_000_000_000) as libc::c_long }
    });
    let timeout = left.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the list and the time-out outlive the call; a null mask leaves signals as they are.
    check(unsafe { libc::ppoll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, timeout, std::ptr::null()) })?;
    Ok(polled.iter().map(|polled| polled.revents != 0).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_link_hands_over_a_batch_for_each_request() {
        for kind in [LinkKind::Pipe, LinkKind::Socket, LinkKind::Futex, LinkKind::SharedMemory] {
            let (mut asker, mut maker) = kind.pair().unwrap();
            let mut made = 0;
            std::thread::scope(|scope| {
                scope.spawn(|| (0..3).for_each(|_| maker.serve(|| Ok(made += 1)).unwrap()));
                (0..3).for_each(|_| asker.ask().unwrap());
            });
            assert_eq!(made, 3, "{kind:?}");
        }
    }

    #[test]
    fn waiting_for_a_silent_file_ends_at_the_deadline() {
        use std::os::fd::AsRawFd;
        let (reader, mut writer) = std::io::pipe().unwrap();
        assert_eq!(wait_readable(&[reader.as_raw_fd()], Some(now_ns() + 1000)).unwrap(), [false]);
        writer.write_all(&[1]).unwrap();
        assert_eq!(wait_readable(&[reader.as_raw_fd()], None).unwrap(), [true]);
    }
}
