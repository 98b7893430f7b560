/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Which ordinary wake-ups do not wait for the end of somebody's turn: those of
 * tasks that are well behind what runs on the CPU they wake on, or near it, and
 * usually run much shorter.
 */

/* How far behind: so much that the switch pays, and that tasks which wake each other do not. */
#define PREEMPT_LAG_NS	(1ULL * NSEC_PER_MSEC)
/* So many times shorter its run must be: of tasks that are more alike, who came first is best let finish. */
#define PREEMPT_RATIO	4
/* CPUs looked at beside the one that it wakes on. */
#define PREEMPT_TRIES	4
/* What a task that usually runs for less than SOON_NS is let have before one that wakes may take its turn. */
#define PREEMPT_AFTER_NS	(100ULL * NSEC_PER_USEC)

/* True when @p usually runs much shorter than what has run on @cctx's CPU for @ran_ns. */
static bool runs_shorter(const struct task_struct *p, const struct cpu_ctx *cctx, u64 ran_ns)
{
	u64 other_ns = usual_run_ns(cctx->run_sum_ns + ran_ns, cctx->run_sleeps);

	if (ran_ns < PREEMPT_AFTER_NS && other_ns < SOON_NS)
		return false;
	/* It is no longer what it was. */
	if (other_ns < ran_ns)
		other_ns = ran_ns;
	return runs_below(p, other_ns / PREEMPT_RATIO);
}

/* True when what runs on @cpu should give way to @p, which wakes with @vtime. */
static bool gives_way_to(s32 cpu, const struct task_struct *p, u64 vtime, u64 now)
{
	struct cpu_ctx *cctx = cpu_ctx_of(cpu);
	u64 ran_ns;

	if (!gives_way(cctx, CPU_ORDINARY, now))
		return false;
	if (cctx->is_idle_class)
		return true;
	ran_ns = time_delta(now, cctx->run_at);
	/* On a busy machine vtime is about as fast as time. */
	return time_before(vtime + PREEMPT_LAG_NS, cctx->run_vtime + ran_ns) && runs_shorter(p, cctx, ran_ns);
}

/*
 * The CPU, claimed, on which @p, an ordinary task that wakes with @vtime, should
 * run at once: @cpu, or, for one that is well behind its LLC's clock, another of
 * that LLC. Negative when there is none.
 */
static s32 pick_preempted(struct task_struct *p, s32 cpu, u64 vtime)
{
	u32 llc = llc_of(cpu), i;
	u64 now;

	if (p->policy == SCHED_BATCH || p->policy == SCHED_IDLE)
		return -EBUSY;
	now = scx_bpf_now();
	if (gives_way_to(cpu, p, vtime, now))
		return claim(cpu, now) ? cpu : -EBUSY;
	if (!time_before(vtime + PREEMPT_LAG_NS, llc_ctx_of(llc)->vtime_now))
		return -EBUSY;
	bpf_for(i, 0, PREEMPT_TRIES) {
		cpu = bpf_cpumask_any_distribute(p->cpus_ptr);
		if (cpu < nr_cpus && llc_of(cpu) == llc && gives_way_to(cpu, p, vtime, now))
			return claim(cpu, now) ? cpu : -EBUSY;
	}
	return -EBUSY;
}
