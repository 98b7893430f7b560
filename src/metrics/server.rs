//! The counters over scx_stats' socket, as other sched_ext schedulers serve theirs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Result;
use crossbeam::channel::{Receiver, Sender};
use scx_stats::prelude::*;

use super::Counters;

/// Serves the counters while it lives.
pub struct Server {
    // Its drop ends the service.
    _server: StatsServer<(), Counters>,
    answers: Sender<Counters>,
    requests: Receiver<()>,
}

impl Server {
    /// Where requests arrive; each wants one [`Self::answer`].
    pub fn requests(&self) -> &Receiver<()> {
        &self.requests
    }

    /// Answers one request with counters since the start of the scheduler.
    ///
    /// # Errors
    /// The service has ended.
    pub fn answer(&self, counters: Counters) -> Result<()> {
        Ok(self.answers.send(counters)?)
    }
}

/// Starts to serve. Each client gets what happened since it asked last.
///
/// # Errors
/// The socket could not be made.
pub fn serve() -> Result<Server> {
    let open: Box<dyn StatsOpener<(), Counters>> = Box::new(move |(request, answer)| {
        request.send(())?;
        let mut last = answer.recv()?;
        let read: Box<dyn StatsReader<(), Counters>> = Box::new(move |_args, (request, answer)| {
            request.send(())?;
            let now = answer.recv()?;
            let interval = now.since(&last);
            last = now;
            interval.to_json()
        });
        Ok(read)
    });
    let data = StatsServerData::new()
        .add_meta(Counters::meta())
        .add_meta(super::GpuCounters::meta())
        .add_ops("top", StatsOps { open, close: None });
    let server = StatsServer::new(data).launch()?;
    let (answers, requests) = server.channels();
    Ok(Server { _server: server, answers, requests })
}

/// Prints a line every `interval` with what a running scx_stoker counted, until `shutdown`.
///
/// # Errors
/// The connection failed for another reason than that no scx_stoker runs yet.
pub fn monitor(interval: Duration, shutdown: &AtomicBool) -> Result<()> {
    scx_utils::monitor_stats::<Counters>(
        &[],
        interval,
        || shutdown.load(Ordering::Relaxed),
        |counters| {
            println!("{}", counters.status_line());
            Ok(())
        },
    )
}
