/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * How long a task usually runs before it sleeps, which tells more of it than
 * how much it used of late. One that is done much sooner than others is best
 * let go first. Of those that take about equally long, who came first is: so
 * all of them are done sooner. And one that is done soon anyway is best not
 * interrupted.
 */

/* The turn of an ordinary task, but for those that are done soon. */
const volatile u64 slice_ns = 3ULL * NSEC_PER_MSEC;

/* So many times shorter than others' a task's run must be. */
#define BRIEF_RATIO	2
/* Who runs longer than that, runs long: how much longer does not matter. */
#define LONG_RUN_NS	(20ULL * NSEC_PER_MSEC)
/* A task that usually sleeps after no more than SOON_NS has a turn of SOON_TURN_NS, which it will not use up. */
#define SOON_NS		(5ULL * NSEC_PER_MSEC)
#define SOON_TURN_NS	(20ULL * NSEC_PER_MSEC)
/* What an LLC's CPUs are busy with is averaged over so many looks at one of them. */
#define USUAL_OVER	16

/* How long a task that ran for @sum_ns in all and slept @sleeps times runs before it sleeps, on average. */
static __always_inline u64 usual_run_ns(u64 sum_ns, u64 sleeps)
{
	return sum_ns / (sleeps + 1);
}

/* True when @p usually runs for less than @run_ns. */
static __always_inline bool runs_below(const struct task_struct *p, u64 run_ns)
{
	return p->se.sum_exec_runtime < run_ns * (p->nvcsw + 1);
}

/* True when @p usually runs much shorter than what the CPUs of @llc are busy with. */
static __always_inline bool is_brief(const struct task_struct *p, u32 llc)
{
	return runs_below(p, llc_ctx_of(llc)->usual_run_ns / BRIEF_RATIO);
}

/* The turn of @p, if others need not wait too long for theirs. */
static __always_inline u64 whole_turn(const struct task_struct *p)
{
	return runs_below(p, SOON_NS) && slice_ns < SOON_TURN_NS ? SOON_TURN_NS : slice_ns;
}

/* Adds what runs on @cpu, which is busy, to what its LLC's CPUs are busy with. The tick's own. */
static void look_at_run(s32 cpu, const struct cpu_ctx *cctx, u64 now)
{
	u64 usual_ns = usual_run_ns(cctx->run_sum_ns + time_delta(now, cctx->run_at), cctx->run_sleeps);
	struct llc_ctx *lctx = llc_ctx_of(llc_of(cpu));

	if (usual_ns > LONG_RUN_NS)
		usual_ns = LONG_RUN_NS;
	lctx->usual_run_ns = (lctx->usual_run_ns * (USUAL_OVER - 1) + usual_ns) / USUAL_OVER;
}
