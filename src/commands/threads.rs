//! `scx_stoker threads`: who feeds which GPU, and who supplies them, as the running scheduler knows it.

use anyhow::Result;
use clap::Args;

use crate::metrics::{self, Role, Thread};

/// Options of `scx_stoker threads`.
#[derive(Args, Clone, Debug)]
pub struct ThreadsArgs {
    /// Print JSON, for programs
    #[arg(long)]
    pub json: bool,
}

/// # Errors
/// No scx_stoker runs here.
pub fn run(args: &ThreadsArgs) -> Result<()> {
    let threads = metrics::ask_threads()?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&threads)?);
    } else {
        print!("{}", table(threads));
    }
    Ok(())
}

/// Feeders by GPU, each GPU's suppliers after them, then those that used a GPU and are neither.
fn table(mut threads: Vec<Thread>) -> String {
    let rank = |thread: &Thread| match thread.role {
        Role::Feeder => 0,
        Role::Supplier => thread.depth,
        Role::User => u32::MAX,
    };
    threads.sort_by_key(|thread| (thread.role == Role::User, thread.gpu, rank(thread), thread.pid, thread.tid));
    let mut text = format!("{:>4} {:<12} {:>8} {:>8}  {:<16} {}\n", "GPU", "role", "PID", "TID", "name", "known by");
    for thread in &threads {
        let role = match thread.role {
            Role::Feeder => "feeder".to_string(),
            Role::Supplier if thread.depth > 1 => format!("supplier/{}", thread.depth),
            Role::Supplier => "supplier".to_string(),
            Role::User => "(user)".to_string(),
        };
        text += &format!(
            "{:>4} {:<12} {:>8} {:>8}  {:<16} {}\n",
            thread.gpu,
            role,
            thread.pid,
            thread.tid,
            thread.comm,
            thread.evidence.join(", ")
        );
    }
    text
}
