/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Which ordinary wake-ups do not wait for the end of somebody's turn: those of
 * tasks that are well behind what runs on the CPU they wake on.
 */

/* How far behind: so much that the switch pays, and that tasks which wake each other do not. */
#define PREEMPT_LAG_NS	(1ULL * NSEC_PER_MSEC)
/* What a task runs before one that wakes may take its turn. */
#define PREEMPT_AFTER_NS	(300ULL * NSEC_PER_USEC)

/* @p's vtime as it wakes on @cpu: sleep earns a lead of one slice at most. */
static __always_inline u64 wake_vtime(const struct task_struct *p, s32 cpu)
{
	u64 earliest = llc_ctx_of(llc_of(cpu))->vtime_now - slice_ns;

	return time_before(p->scx.dsq_vtime, earliest) ? earliest : p->scx.dsq_vtime;
}

/* True when @p, an ordinary task that wakes with @vtime, should run on @cpu at once. */
static bool preempts(const struct task_struct *p, s32 cpu, u64 vtime)
{
	struct cpu_ctx *cctx = cpu_ctx_of(cpu);
	u64 now, ran_ns;

	if (cctx->user != CPU_ORDINARY || cctx->taken || p->policy == SCHED_BATCH || p->policy == SCHED_IDLE)
		return false;
	if (!cctx->is_idle_class && !time_before(vtime + PREEMPT_LAG_NS, cctx->run_vtime + slice_ns))
		return false;
	now = scx_bpf_now();
	if (time_before(now, cctx->claimed_until))
		return false;
	ran_ns = time_delta(now, cctx->run_at);
	if (cctx->is_idle_class)
		return true;
	/* On a busy machine vtime is about as fast as time. */
	return ran_ns > PREEMPT_AFTER_NS && time_before(vtime + PREEMPT_LAG_NS, cctx->run_vtime + ran_ns);
}
