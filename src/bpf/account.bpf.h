/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What feeders got and what they missed. Only feeders are counted; ordinary
 * tasks pass through here at the price of one test.
 */

/* Raised by user space once an interval; each feeder counts itself once in each. */
u32 epoch;

static __always_inline u32 log2_bucket(u64 ns)
{
	u32 b = 0;

	if (ns >> 32) { b += 32; ns >>= 32; }
	if (ns >> 16) { b += 16; ns >>= 16; }
	if (ns >> 8) { b += 8; ns >>= 8; }
	if (ns >> 4) { b += 4; ns >>= 4; }
	if (ns >> 2) { b += 2; ns >>= 2; }
	b += ns >> 1;
	return b < STOKER_DELAY_BUCKETS ? b : STOKER_DELAY_BUCKETS - 1;
}

static __always_inline void count(u64 *counter)
{
	__sync_fetch_and_add(counter, 1);
}

/* @tctx, a feeder, runs away from home for reason @spill. */
static __always_inline void count_spill(const struct task_ctx *tctx, enum stoker_spill spill)
{
	count(&gpu_ctx_of(tctx->gpu)->stats.spills[spill]);
}

#define ONE_WAITING	1ULL
#define ONE_RUNNING	(1ULL << 32)

/*
 * Changes how many of @gpu's feeders wait and run by @change, and adds up the
 * time in which some waited and none ran.
 */
static void change_gpu_state(u32 gpu, u64 change, u64 now)
{
	struct gpu_ctx *g = gpu_ctx_of(gpu);
	u64 state, since;

	state = __sync_fetch_and_add(&g->state, change) + change;
	if (state && !(state >> 32)) {
		__sync_val_compare_and_swap(&g->starving_since, 0, now);
		return;
	}
	since = g->starving_since;
	if (since && __sync_val_compare_and_swap(&g->starving_since, since, 0) == since &&
	    time_after(now, since))
		__sync_fetch_and_add(&g->stats.starvation_ns, now - since);
}

/* Takes @tctx out of the state of the GPU it is counted in, if it is. */
static void uncount(struct task_ctx *tctx, u64 now)
{
	u32 gpu = tctx->counted_gpu;

	if (gpu == STOKER_NO_GPU)
		return;
	tctx->counted_gpu = STOKER_NO_GPU;
	change_gpu_state(gpu, tctx->waiting ? -ONE_WAITING : -ONE_RUNNING, now);
}

/* @tctx, a feeder, is runnable and does not run from @now on. */
static void account_waiting(struct task_ctx *tctx, u64 now)
{
	if (tctx->counted_gpu != STOKER_NO_GPU && tctx->waiting)
		return;
	uncount(tctx, now);
	tctx->counted_gpu = tctx->gpu;
	tctx->waiting = true;
	tctx->wait_since = now;
	change_gpu_state(tctx->gpu, ONE_WAITING, now);
}

/* @tctx, a feeder, got a CPU. */
static void account_running(struct task_ctx *tctx, u64 now)
{
	struct stoker_gpu_stats *stats = &gpu_ctx_of(tctx->gpu)->stats;

	if (tctx->wait_since) {
		u64 delay = time_delta(now, tctx->wait_since);

		__sync_fetch_and_add(&stats->delay_ns, delay);
		count(&stats->delays[log2_bucket(delay) % STOKER_DELAY_BUCKETS]);
		tctx->wait_since = 0;
	}
	uncount(tctx, now);
	tctx->counted_gpu = tctx->gpu;
	tctx->waiting = false;
	change_gpu_state(tctx->gpu, ONE_RUNNING, now);
}

/* @tctx, a feeder, ran @run_ns on @cpu. */
static void account_run(struct task_ctx *tctx, s32 cpu, u64 run_ns)
{
	struct stoker_gpu_stats *stats = &gpu_ctx_of(tctx->gpu)->stats;

	__sync_fetch_and_add(is_home(cpu, tctx->domain) ? &stats->home_ns : &stats->away_ns, run_ns);
	tctx->run_ns += run_ns;
	if (tctx->epoch != epoch) {
		tctx->epoch = epoch;
		count(&stats->feeders);
	}
}

/* @tctx, counted as a feeder when it last waited, got a CPU as an ordinary task. */
static void account_expired(struct task_ctx *tctx, u64 now)
{
	uncount(tctx, now);
	tctx->wait_since = 0;
}

/* @tctx, a feeder, left its CPU, @runnable or to sleep. */
static void account_stopping(struct task_ctx *tctx, bool runnable, u64 now)
{
	if (runnable) {
		account_waiting(tctx, now);
		return;
	}
	uncount(tctx, now);
	tctx->avg_run_ns = (7 * tctx->avg_run_ns + tctx->run_ns) / 8;
	tctx->run_ns = 0;
}

/* Takes what @p, a supplier, ran by its grant out of the budget of the domain that it works for. */
static void settle_supplier(struct task_struct *p, u64 run_ns)
{
	struct task_ctx *tctx = task_ctx_of(p);

	if (!tctx || !tctx->granted)
		return;
	charge_budget(gpu_domain[tctx->supplied_gpu % STOKER_MAX_GPUS], run_ns);
	/* If it goes on, it does so by its fair share. */
	tctx->granted = false;
}

/*
 * @p, the current task of @cctx's CPU, has a turn of @turn_ns, or as much of that
 * as its group's limit leaves and, unless it has it by a feeder's grant, as it
 * can afford. It will pay what CPU time costs now: a turn that was cheap is not
 * to turn out dear.
 */
static __always_inline void begin_turn(struct task_struct *p, struct cpu_ctx *cctx, u64 turn_ns)
{
	u32 limit = group_of(cctx->group)->limit;

	cctx->cost = cost_of(p, cctx->group);
	if (limit)
		turn_ns = limited_turn(turn_ns, limit, cctx->user == CPU_FEEDER);
	if (cctx->user != CPU_FEEDER)
		turn_ns = affordable_turn(turn_ns, cctx->cost);
	cctx->turn_ns = turn_ns;
	if (p->scx.slice != turn_ns)
		scx_bpf_task_set_slice(p, turn_ns);
}

/*
 * What is left of the turn of @p, which is settled, on @cctx's CPU: more than 0
 * only if it was ended early, by a task that displaced @p or by sched_yield(2).
 * (Of that the kernel would also tell, at a price.)
 */
static __always_inline u64 turn_left(const struct task_struct *p, const struct cpu_ctx *cctx)
{
	return !p->scx.slice && cctx->ran_ns < cctx->turn_ns ? cctx->turn_ns - cctx->ran_ns : 0;
}

/* Nobody begins with more to pay for: a long turn's worth. */
#define MOST_UNPAID_NS	(20ULL * NSEC_PER_MSEC)

/*
 * @p has run for the last time, on @cctx's CPU, of @llc. What it has not paid
 * for would be nobody's: tasks that do their work in children which soon end
 * would have it for nothing. So tasks that begin owe what those of their group
 * leave, on average. What all leave is then what all pay.
 */
static void leave_unpaid(const struct task_struct *p, const struct cpu_ctx *cctx, u32 llc)
{
	struct group *g = group_of(cctx->group);
	u64 now = llc_ctx_of(llc)->vtime_now, unpaid_ns = 0;

	if (time_after(p->scx.dsq_vtime, now))
		unpaid_ns = ((p->scx.dsq_vtime - now) << COST_SHIFT) / cctx->cost;
	if (unpaid_ns > MOST_UNPAID_NS)
		unpaid_ns = MOST_UNPAID_NS;
	unpaid_ns = approach(g->unpaid_ns, unpaid_ns);
	if (g->unpaid_ns != unpaid_ns)
		g->unpaid_ns = unpaid_ns;
}

/* The vtime of @p, of @group, which begins in @llc. */
static u64 first_vtime(const struct task_struct *p, u32 group, u32 llc)
{
	return llc_ctx_of(llc)->vtime_now + (group_of(group)->unpaid_ns * cost_of(p, group) >> COST_SHIFT);
}

/*
 * Takes account of what @p ran on @cpu since the last time: its vtime, for a
 * feeder its domain's budget and its GPU's counters, for a supplier the budget.
 */
static void settle(struct task_struct *p, struct task_ctx *feeder, s32 cpu, struct cpu_ctx *cctx)
{
	u64 run_ns = p->se.sum_exec_runtime - cctx->run_sum_ns;
	u64 vtime = p->scx.dsq_vtime + (run_ns * cctx->cost >> COST_SHIFT);
	u32 limit = group_of(cctx->group)->limit;

	cctx->run_sum_ns = p->se.sum_exec_runtime;
	if (run_ns)
		cctx->ran_ns = run_ns;
	if (limit)
		charge_limits(limit, run_ns, !!feeder);
	if (cctx->user == CPU_SUPPLIER)
		settle_supplier(p, run_ns);
	if (feeder) {
		u64 latest = llc_ctx_of(feeder->llc)->vtime_now + slice_ns;

		account_run(feeder, cpu, run_ns);
		charge_budget(feeder->domain, run_ns);
		/*
		 * What it got by its grant is paid from the budget: of its fair share it owes a slice at most, whatever
		 * its weight. Afterwards it takes its turns like others, rather than waiting until all have caught up.
		 */
		if (feeder->granted && time_after(vtime, latest))
			vtime = latest;
	}
	set_vtime(p, vtime);
}
