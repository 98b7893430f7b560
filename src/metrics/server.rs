//! The counters over scx_stats' socket, as other sched_ext schedulers serve theirs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use crossbeam::channel::{Receiver, Sender};
use scx_stats::prelude::*;

use super::{Counters, Thread};

/// What a client wants to know.
#[derive(Clone, Copy, Debug)]
pub enum Request {
    /// Counters since the start.
    Counters,
    /// The threads that are something to a GPU.
    Threads,
}

/// The answer to each.
enum Answer {
    Counters(Counters),
    Threads(Vec<Thread>),
}

/// The name under which threads are served.
const THREADS: &str = "threads";

/// Serves the counters while it lives.
pub struct Server {
    // Its drop ends the service.
    _server: StatsServer<Request, Answer>,
    answers: Sender<Answer>,
    requests: mpsc::Receiver<Request>,
}

impl Server {
    /// Waits for requests, for `limit` at most and at times less, and returns those that are there; each wants the one answer
    /// of its kind. To be called by the thread that called [`serve`].
    pub fn wait(&self, limit: Duration) -> impl Iterator<Item = Request> {
        thread::park_timeout(limit);
        self.requests.try_iter()
    }

    /// Answers [`Request::Counters`].
    ///
    /// # Errors
    /// The service has ended.
    pub fn answer_counters(&self, counters: Counters) -> Result<()> {
        self.answer(Answer::Counters(counters))
    }

    /// Answers [`Request::Threads`].
    ///
    /// # Errors
    /// The service has ended.
    pub fn answer_threads(&self, threads: Vec<Thread>) -> Result<()> {
        self.answer(Answer::Threads(threads))
    }

    fn answer(&self, answer: Answer) -> Result<()> {
        self.answers.send(answer).map_err(|_| anyhow!("the counters are not served any more"))
    }
}

/// Starts to serve; the calling thread is to [wait](Server::wait) for requests. Each client gets what happened since it
/// asked last.
///
/// # Errors
/// The socket or a thread could not be made.
pub fn serve() -> Result<Server> {
    let counters: Box<dyn StatsOpener<Request, Answer>> = Box::new(move |channels| {
        let mut last = ask_counters(channels)?;
        let read: Box<dyn StatsReader<Request, Answer>> = Box::new(move |_args, channels| {
            let now = ask_counters(channels)?;
            let interval = now.since(&last);
            last = now;
            interval.to_json()
        });
        Ok(read)
    });
    let threads: Box<dyn StatsOpener<Request, Answer>> = Box::new(move |_channels| {
        let read: Box<dyn StatsReader<Request, Answer>> = Box::new(move |_args, (request, answer)| {
            request.send(Request::Threads)?;
            match answer.recv()? {
                Answer::Threads(threads) => Ok(serde_json::to_value(threads)?),
                Answer::Counters(_) => bail!("another question was answered"),
            }
        });
        Ok(read)
    });
    let data = StatsServerData::new()
        .add_meta(Counters::meta())
        .add_meta(super::GpuCounters::meta())
        .add_ops("top", StatsOps { open: counters, close: None })
        .add_ops(THREADS, StatsOps { open: threads, close: None });
    let server = StatsServer::new(data).launch()?;
    let (answers, asked) = server.channels();
    let (forward, requests) = mpsc::channel();
    let waiting = thread::current();
    // Whoever waits for a channel for a limited time spins and yields for a while first, each time, which takes turns from
    // others where there is work to do. This thread does so once for each request.
    thread::Builder::new().name("requests".to_string()).spawn(move || {
        for request in asked {
            if forward.send(request).is_err() {
                return;
            }
            waiting.unpark();
        }
    })?;
    Ok(Server { _server: server, answers, requests })
}

fn ask_counters((request, answer): (&Sender<Request>, &Receiver<Answer>)) -> Result<Counters> {
    request.send(Request::Counters)?;
    match answer.recv()? {
        Answer::Counters(counters) => Ok(counters),
        Answer::Threads(_) => bail!("another question was answered"),
    }
}

/// Asks the scx_stoker that runs for the threads that are something to a GPU.
///
/// # Errors
/// None runs, or it did not answer.
pub fn ask_threads() -> Result<Vec<Thread>> {
    let mut client =
        StatsClient::new().connect(None).context("no scx_stoker runs here (nothing serves its counters)")?;
    client.request("stats", vec![("target".to_string(), THREADS.to_string())])
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
