/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Where tasks wait. Each LLC has a queue of ordinary tasks ordered by vtime,
 * each CPU one of ordinary tasks that can run nowhere else, each domain one of
 * feeders, first come first served. A CPU serves feeders of its domains, then
 * its own queue and its LLC's by vtime, then other LLCs', nearest first.
 */

/* Feeders that share a home CPU take turns this long. */
const volatile u64 feeder_slice_ns = 2ULL * NSEC_PER_MSEC;

/* A task that wakes this little ahead of the clock need not queue for one CPU: it would be first, or as good as. */
#define FIRST_LEAD_NS	(1ULL * NSEC_PER_MSEC)

/* Ordinary tasks that could run elsewhere wait for a CPU that feeders have to themselves this long at most. */
#define FEEDERS_ONLY_NS	(500ULL * NSEC_PER_MSEC)

/* Dispatches of a CPU between two looks at other LLCs, unless its own has none whose turn it is. */
#define BALANCE_TURNS	16

/* An LLC that is this far behind another has too much to do: its tasks wait longer than they are due. */
#define BALANCE_LAG_NS	(5ULL * NSEC_PER_MSEC)

static __always_inline u64 cpu_queue(s32 cpu)
{
	return QUEUE_CPU + cpu;
}

static __always_inline u64 llc_queue(u32 llc)
{
	return QUEUE_LLC + llc;
}

static __always_inline u64 feeder_queue(u32 domain)
{
	return QUEUE_FEEDERS + domain;
}

static int make_queues(void)
{
	int err;
	u32 i;

	bpf_for(i, 0, nr_cpus) {
		err = scx_bpf_create_dsq(cpu_queue(i), -1);
		if (err)
			return err;
	}
	bpf_for(i, 0, nr_llcs) {
		err = scx_bpf_create_dsq(llc_queue(i), -1);
		if (err)
			return err;
	}
	bpf_for(i, 0, nr_domains) {
		err = scx_bpf_create_dsq(feeder_queue(i), -1);
		if (err)
			return err;
	}
	return 0;
}

/* True when @p can run on one CPU only, for now or for good. */
static __always_inline bool is_pinned(const struct task_struct *p)
{
	/*
	 * BPF's own prologue may raise migration_disabled to 1 for the task that runs this program; whether it does
	 * depends on CONFIG_PREEMPT_RCU, and asking for that would need the kernel's configuration at run time. Such a
	 * task is taken for one that can move. That is safe: it is queued only, and who takes it checks again.
	 */
	return p->nr_cpus_allowed == 1 || p->migration_disabled > 1 ||
	       (p->migration_disabled && bpf_get_current_task_btf() != p);
}

/*
 * Queues @p, which can run on @cpu only, for @cpu. @cpu's run queue is locked
 * here and where @cpu looks, so has_pinned and the queue go together.
 */
static void enqueue_pinned(struct task_struct *p, s32 cpu, u64 vtime, u64 enq_flags)
{
	struct cpu_ctx *cctx = cpu_ctx_of(cpu);

	if (!cctx->has_pinned || time_before(vtime, cctx->pinned_vtime))
		cctx->pinned_vtime = vtime;
	cctx->has_pinned = true;
	scx_bpf_dsq_insert_vtime(p, cpu_queue(cpu), whole_turn(p), vtime, enq_flags);
	/* select_cpu(), which would have woken an idle CPU, is not asked for a task with one CPU. */
	kick(cpu, SCX_KICK_IDLE);
}

/*
 * True when @p, of which nothing is known and which can run on one CPU only,
 * yields it, and nobody else wants it but such as @p: those need no more than to
 * take turns.
 */
static __always_inline bool yields_here(const struct task_struct *p, u64 enq_flags)
{
	s32 cpu = cpu_of(p);
	struct cpu_ctx *cctx = cpu_ctx_of(cpu);

	return !(enq_flags & SCX_ENQ_WAKEUP) && !is_marked(p) && turn_left(p, cctx) && is_pinned(p) &&
	       bpf_get_current_task_btf() == p && !cctx->has_pinned && !feeders_waiting &&
	       !llc_ctx_of(llc_of(cpu))->nr_waiting;
}

/* A task that usually runs no longer than that before it sleeps interrupts a turn, and does not end it. */
#define MOMENT_NS	(250ULL * NSEC_PER_USEC)

/* @p takes the CPU of @cctx from its current task, which goes on after it if that takes but a moment. */
static __always_inline void let_resume(struct cpu_ctx *cctx, const struct task_struct *p)
{
	cctx->resumes = !cctx->is_idle_class && runs_below(p, MOMENT_NS);
}

/* What is left to @p of its turn on @cctx's CPU, 0 unless it lost that for a moment only. */
static __always_inline u64 resumed_turn(const struct task_struct *p, const struct cpu_ctx *cctx)
{
	return cctx->resumes && bpf_get_current_task_btf() == p ? turn_left(p, cctx) : 0;
}

/* Queues @p by its vtime, whatever else it may be. */
static void enqueue_ordinary(struct task_struct *p, struct task_ctx *tctx, u64 enq_flags)
{
	s32 cpu = cpu_of(p);
	struct cpu_ctx *cctx = cpu_ctx_of(cpu);
	u32 llc = llc_of(cpu), ahead;
	u64 now = llc_ctx_of(llc)->vtime_now, place, left_ns, vtime;

	restore_vtime(p, tctx);
	vtime = enq_flags & SCX_ENQ_WAKEUP ? wake_vtime(p, llc)
					   : with_mark(p, clamp_vtime(p->scx.dsq_vtime, now, LAG_BOUND_NS));
	tctx->llc = llc;
	tctx->granted = false;
	if (group_of(tctx->group)->limit && throttle(p, tctx, false, enq_flags))
		return;
	/* It would go on running, but for its limit, of which that was the end. */
	if (enq_flags & SCX_ENQ_LAST) {
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, whole_turn(p), enq_flags);
		return;
	}
	left_ns = resumed_turn(p, cctx);
	if (left_ns) {
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, left_ns, enq_flags);
		return;
	}
	if (is_pinned(p)) {
		if (p->flags & PF_KTHREAD) {
			/* The kernel's own work for this CPU is short, and others wait for it. */
			u64 preempt = cctx->user != CPU_FEEDER ? SCX_ENQ_PREEMPT : 0;

			if (preempt)
				let_resume(cctx, p);
			scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, whole_turn(p), enq_flags | preempt);
			return;
		}
		if (enq_flags & SCX_ENQ_WAKEUP && !time_after(vtime, now + FIRST_LEAD_NS)) {
			set_vtime(p, vtime);
			scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, whole_turn(p), enq_flags);
			return;
		}
		note_queued(p, tctx, llc, false);
		enqueue_pinned(p, cpu, vtime, enq_flags);
		return;
	}

	ahead = note_queued(p, tctx, llc, true);
	place = enq_flags & SCX_ENQ_WAKEUP ? served_at(p, llc, vtime, tctx->group, ahead) : vtime;
	tctx->owes_ns = vtime - place;
	note_place(llc_ctx_of(llc), place);
	scx_bpf_dsq_insert_vtime(p, llc_queue(llc), whole_turn(p), place, enq_flags);
	/* It lost its CPU, or was never asked for one: another may be idle. */
	if (!(enq_flags & SCX_ENQ_CPU_SELECTED) || enq_flags & SCX_ENQ_REENQ) {
		cpu = scx_bpf_pick_idle_cpu(p->cpus_ptr, 0);
		if (cpu >= 0)
			kick(cpu, SCX_KICK_IDLE);
	}
}

static __always_inline bool pull(u64 queue)
{
	return scx_bpf_dsq_move_to_local(queue, 0);
}

/* Puts @p, a feeder, last in its domain's queue. */
static void enqueue_at_home(struct task_struct *p, struct task_ctx *tctx, u64 enq_flags)
{
	tctx->queued_domain = tctx->domain;
	/*
	 * Raised before the kernel inserts, which it does when this callback has returned, and lowered only when the
	 * task is out again. So a look that comes too early finds the queue empty, but never the counter wrong.
	 */
	__sync_fetch_and_add(&domain_ctx_of(tctx->domain)->nr_waiting, 1);
	__sync_fetch_and_add(&feeders_waiting, 1);
	scx_bpf_dsq_insert(p, feeder_queue(tctx->domain), feeder_slice_ns, enq_flags);
}

/* @tctx is in no feeder queue any more. True if it was in one. */
static __always_inline bool left_feeder_queue(struct task_ctx *tctx)
{
	if (tctx->queued_domain == STOKER_NO_DOMAIN)
		return false;
	__sync_fetch_and_add(&domain_ctx_of(tctx->queued_domain)->nr_waiting, -1);
	__sync_fetch_and_add(&feeders_waiting, -1);
	tctx->queued_domain = STOKER_NO_DOMAIN;
	return true;
}

/*
 * True when feeders have had @cpu for so long that an ordinary task must have a
 * turn, though the domain's budget is not used up: one that can run nowhere
 * else, since a feeder on a home of many CPUs never uses the budget up, or after
 * a much longer time any, since homes that overlap have a budget each.
 */
static __always_inline bool owes_turn(s32 cpu, const struct cpu_ctx *cctx, u64 now)
{
	u64 had_ns = cctx->feeders_since ? time_delta(now, cctx->feeders_since) : 0;

	if (cctx->has_pinned)
		return had_ns > slice_ns * feeder_cap_permille / (1000 - feeder_cap_permille);
	return had_ns > FEEDERS_ONLY_NS && llc_ctx_of(llc_of(cpu))->nr_waiting;
}

/* Takes a waiting feeder of one of @domains. */
static bool dispatch_feeder(u64 domains)
{
	u32 domain;

	if (!feeders_waiting)
		return false;
	bpf_for(domain, 0, nr_domains)
		if (domains & (1ULL << (domain % 64)) && domain_ctx_of(domain)->nr_waiting &&
		    pull(feeder_queue(domain)))
			return true;
	return false;
}

/*
 * Takes the first of the tasks that wait for @cpu alone, of which there are some:
 * if @unless_early, only when the LLC's clock has reached it, so that it takes
 * turns with the tasks of the LLC's queue.
 */
static bool dispatch_pinned(s32 cpu, struct cpu_ctx *cctx, u64 vtime_now, bool unless_early)
{
	struct task_struct *p;

	if (unless_early && time_after(cctx->pinned_vtime, vtime_now))
		return false;
	cctx->has_pinned = false;
	if (!pull(cpu_queue(cpu)))
		return false;
	/* Where the iterator cannot be had (see kick()), the vtime stays: the next one is not before it. */
	if (!bpf_ksym_exists(bpf_iter_scx_dsq_new)) {
		cctx->has_pinned = scx_bpf_dsq_nr_queued(cpu_queue(cpu)) > 0;
		return true;
	}
	bpf_for_each(scx_dsq, p, cpu_queue(cpu), 0) {
		cctx->pinned_vtime = p->scx.dsq_vtime;
		cctx->has_pinned = true;
		break;
	}
	return true;
}

/* The vtime of those whose turn it is in @llc, wherever its clock may be. */
static __always_inline u64 vtime_served(u32 llc)
{
	const struct llc_ctx *lctx = llc_ctx_of(llc);

	return lctx->vtime_early ?: lctx->vtime_now;
}

/* Takes a task from an LLC that is behind. */
static bool dispatch_balance(u32 llc)
{
	u64 served = vtime_served(llc);
	u32 i;

	for (i = 0; i < nr_llcs - 1 && can_loop; i++) {
		u32 other = steal_order[llc % STOKER_MAX_LLCS][i % STOKER_MAX_LLCS] % STOKER_MAX_LLCS;

		if (llc_ctx_of(other)->nr_waiting && time_after(served, vtime_served(other) + BALANCE_LAG_NS) &&
		    pull(llc_queue(other)))
			return true;
	}
	return false;
}

/* Takes a task from any other LLC, nearest first. If none has one, @llc's clock keeps up with the others'. */
static bool dispatch_steal(u32 llc)
{
	u64 now = llc_ctx_of(llc)->vtime_now, latest = now;
	u32 i;

	/* In the way of every CPU that goes idle: bpf_for() would call the kernel for each LLC. */
	for (i = 0; i < nr_llcs - 1 && can_loop; i++) {
		u32 other = steal_order[llc % STOKER_MAX_LLCS][i % STOKER_MAX_LLCS] % STOKER_MAX_LLCS;

		if (llc_ctx_of(other)->nr_waiting && pull(llc_queue(other)))
			return true;
		if (time_after(llc_ctx_of(other)->vtime_now, latest))
			latest = llc_ctx_of(other)->vtime_now;
	}
	if (time_after(latest, now + slice_ns))
		llc_ctx_of(llc)->vtime_now = latest;
	return false;
}

/*
 * True when @vtime is before that of every task in @queue, of which there is
 * one at least. False where the kernel cannot tell.
 */
static bool is_before_all(u64 vtime, u64 queue)
{
	bool is_before = false;
	struct task_struct *p;

	if (bpf_ksym_exists(scx_bpf_dsq_peek)) {
		p = scx_bpf_dsq_peek(queue);
		return p && time_before(vtime, p->scx.dsq_vtime);
	}
	if (!bpf_ksym_exists(bpf_iter_scx_dsq_new))
		return false;
	bpf_for_each(scx_dsq, p, queue, 0) {
		is_before = time_before(vtime, p->scx.dsq_vtime);
		break;
	}
	return is_before;
}

/*
 * True when @prev, an ordinary task whose turn on @cpu ended, is still behind
 * all that wait for @cpu or in its LLC's queue: then it has another. It must be
 * asked before pulling, since @prev is not in a queue now.
 */
static bool keeps_turn(s32 cpu, struct cpu_ctx *cctx, struct task_struct *prev)
{
	u32 llc = llc_of(cpu), nr_waiting = llc_ctx_of(llc)->nr_waiting;
	u64 vtime;

	if (cctx->user == CPU_FEEDER || cctx->user == CPU_OTHER || !(prev->scx.flags & SCX_TASK_QUEUED))
		return false;
	settle(prev, NULL, cpu, cctx);
	if (turn_left(prev, cctx))
		return false;
	if (is_marked(prev) && is_throttled(cctx->group, false))
		return false;
	vtime = prev->scx.dsq_vtime;
	if (cctx->has_pinned ? !time_before(vtime, cctx->pinned_vtime) : !nr_waiting)
		return false;
	if (nr_waiting && !is_before_all(vtime, llc_queue(llc)))
		return false;
	begin_turn(prev, cctx, whole_turn(prev));
	return true;
}

/* Gives @cpu ordinary work: its own, its LLC's, or what other LLCs have too much of. */
static bool dispatch_ordinary(s32 cpu, struct cpu_ctx *cctx, struct task_struct *prev)
{
	u32 llc = llc_of(cpu);
	u64 vtime_now = llc_ctx_of(llc)->vtime_now;

	if (prev && keeps_turn(cpu, cctx, prev))
		return true;
	if (nr_ready_groups && dispatch_limited())
		return true;
	/* Mostly there are none, and a call costs more than to look. */
	if (cctx->has_pinned && dispatch_pinned(cpu, cctx, vtime_now, true))
		return true;
	if (nr_llcs > 1 && (llc_ctx_of(llc)->vtime_early || ++cctx->dispatches % BALANCE_TURNS == 0) &&
	    dispatch_balance(llc))
		return true;
	if (llc_ctx_of(llc)->nr_waiting && pull(llc_queue(llc)))
		return true;
	if (cctx->has_pinned && dispatch_pinned(cpu, cctx, vtime_now, false))
		return true;
	return nr_llcs > 1 && dispatch_steal(llc);
}
