/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * In which order ordinary tasks are served: the clocks of LLCs, how far from
 * them a task's vtime may be, and its place in the queue, which is not always by
 * its vtime.
 */

/* No task is to wait longer than about this, however little it weighs: a third of the kernel's watchdog. */
#define WAIT_BOUND_NS	(10ULL * NSEC_PER_SEC)
/* A task that could not have all that it is due keeps a claim to this much, no more. */
#define LAG_BOUND_NS	(100ULL * NSEC_PER_MSEC)
/* As much as sleep earns a task that is brief. Any other earns one slice. */
#define BRIEF_LEAD_NS	(50ULL * NSEC_PER_MSEC)
/* Those of a group that wake at once are served in that order as long as others wait no longer for it. */
#define BURST_NS	(5ULL * NSEC_PER_MSEC)
/* What a task usually runs can be told when it has slept so often. */
#define KNOWN_SLEEPS	8
/* Tasks that wake are served in that order as long as they differ by less than this in what they used. */
#define ORDER_WINDOW_NS	(20ULL * NSEC_PER_MSEC)

/*
 * @vtime, brought near enough to the clock, @now: it is behind by @lag_ns at
 * most, and a task that pays much for its turns waits WAIT_BOUND_NS at most.
 */
static __always_inline u64 clamp_vtime(u64 vtime, u64 now, u64 lag_ns)
{
	if (time_before(vtime, now - lag_ns))
		return now - lag_ns;
	if (time_after(vtime, now + WAIT_BOUND_NS))
		return now + WAIT_BOUND_NS;
	return vtime;
}

/* The vtime of @p, which wakes in @llc. */
static __always_inline u64 wake_vtime(const struct task_struct *p, u32 llc)
{
	u64 lead_ns = is_brief(p, llc) ? BRIEF_LEAD_NS : slice_ns;

	return with_mark(p, clamp_vtime(p->scx.dsq_vtime, llc_ctx_of(llc)->vtime_now, lead_ns));
}

/*
 * How much later than the clock the turn of @p is, of @group, which wakes while
 * others of it that weigh @ahead wait: by what it usually runs itself. Thousands
 * of threads that wake at once are due no more than their group is. With the
 * clock's time, all would have a turn before any other group had one.
 */
static u64 backlog_ns(const struct task_struct *p, u32 group, u32 ahead)
{
	/* For a nanosecond of each of those, on the CPUs of one LLC. */
	u64 cost = (u64)ahead * group_of(group)->cost_own * nr_llcs / p->scx.weight;
	u64 run_ns = MIN_TURN_NS, backlog;

	if (cost < (BURST_NS << COST_SHIFT) / MIN_TURN_NS)
		return 0;
	if (cost > (WAIT_BOUND_NS << COST_SHIFT) / MIN_TURN_NS)
		cost = (WAIT_BOUND_NS << COST_SHIFT) / MIN_TURN_NS;
	if (p->nvcsw >= KNOWN_SLEEPS && runs_below(p, MIN_TURN_NS))
		run_ns = usual_run_ns(p->se.sum_exec_runtime, p->nvcsw);
	backlog = cost * run_ns >> COST_SHIFT;
	return backlog > BURST_NS ? backlog - BURST_NS : 0;
}

/*
 * The place in the queue of @p, which wakes in @llc with @vtime while others of
 * its group that weigh @ahead wait: that of all who wake now, unless these are
 * many, or it is brief and has lead, or has used so much that others must have
 * their share first.
 */
static __always_inline u64 served_at(const struct task_struct *p, u32 llc, u64 vtime, u32 group, u32 ahead)
{
	u64 now = llc_ctx_of(llc)->vtime_now, backlog = backlog_ns(p, group, ahead);

	if (time_after(vtime, now + ORDER_WINDOW_NS + backlog))
		return vtime - ORDER_WINDOW_NS;
	if (!backlog && time_before(vtime, now) && is_brief(p, llc))
		return vtime;
	return with_mark(p, now + backlog);
}

/* @p has left the queue in which it had another place than by its vtime, which is its own again. */
static __always_inline void restore_vtime(struct task_struct *p, struct task_ctx *tctx)
{
	if (!tctx->owes_ns)
		return;
	scx_bpf_task_set_dsq_vtime(p, p->scx.dsq_vtime + tctx->owes_ns);
	tctx->owes_ns = 0;
}

/*
 * @p, whose vtime is beyond the clock of @lctx, got a CPU there, or goes on. The
 * clock is the vtime of those whose turn it is: of tasks that @waited, or, while
 * nobody waits in the LLC's queue, of whoever runs. Then it was early only
 * because nobody else wanted the CPU, and need not pay for that. Those who
 * waited do, but the clock does not follow them at once: see free_clocks().
 */
static void advance_clock(struct task_struct *p, struct llc_ctx *lctx, bool waited)
{
	u64 vtime = p->scx.dsq_vtime;

	if (!waited) {
		if (lctx->nr_waiting)
			return;
		if (time_after(vtime, lctx->vtime_now + slice_ns)) {
			vtime = lctx->vtime_now + slice_ns;
			set_vtime(p, vtime);
		}
	}
	lctx->vtime_now = time_after(vtime, lctx->vtime_most) ? lctx->vtime_most : vtime;
}

/* A task with @vtime that waited in the queue of @lctx, and so was the first there, got a CPU. */
static __always_inline void note_served(struct llc_ctx *lctx, u64 vtime)
{
	u64 early = time_after(vtime, lctx->vtime_most) ? vtime : 0;

	if (lctx->vtime_early != early)
		lctx->vtime_early = early;
}

/* A task with the place @place begins to wait in the queue of @lctx: who was served last tells no more who is next. */
static __always_inline void note_place(struct llc_ctx *lctx, u64 place)
{
	if (lctx->vtime_early && time_before(place, lctx->vtime_early))
		lctx->vtime_early = 0;
}
