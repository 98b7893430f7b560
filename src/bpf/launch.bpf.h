/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Who launches work on a GPU by calling its vendor's library. Where work is
 * submitted by writing to mapped memory, this alone tells a feeder from the
 * other threads of its process, whatever it does while it waits. A probed call
 * traps into the kernel, so user space turns the probes on for a short sample
 * now and then.
 */

/* How long a launch speaks for its thread: longer than until the next samples, one of which may miss it. */
const volatile u64 launch_ttl_ns = 30ULL * NSEC_PER_SEC;

/* The number of the sample that is taken, or was last. */
u32 launch_sample;
/* Calls seen. */
u64 launch_calls;

/* The current thread calls a library to launch work. The time here is of another clock than the scheduler's: it takes none. */
SEC("uprobe.multi")
int note_launch(void *ctx)
{
	struct task_ctx *tctx = need_current_ctx();

	__sync_fetch_and_add(&launch_calls, 1);
	if (tctx)
		tctx->launched_in = launch_sample;
	return 0;
}

/* A sample is over: user space asks of each thread of a process that uses @launches->gpus. */
SEC("syscall")
int judge_launches(struct stoker_launches *launches)
{
	struct task_struct *p = bpf_task_from_pid(launches->tid);
	struct task_ctx *tctx;
	u64 now;

	launches->launched = false;
	if (!p)
		return 0;
	tctx = task_ctx_of(p);
	if (tctx && tctx->launched_in == launches->sample && launches->gpus) {
		launches->launched = true;
		now = scx_bpf_now();
		feed_one_of(tctx, launches->gpus, now);
		tctx->evidence |= STOKER_EV_LAUNCH;
		if (!time_before(now, tctx->barred_until))
			be_feeder(tctx, now + launch_ttl_ns);
	}
	bpf_task_release(p);
	return 0;
}
