/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Where a feeder goes when it wakes: an idle home CPU, else one whose ordinary
 * task gives way, else, with home full of feeders, to wait there when one is
 * about to block, else away. One without a grant takes an idle CPU anywhere, or
 * queues as an ordinary task.
 */

/* A feeder waits at home for another one rather than leave, when it is expected to be this short. */
const volatile u64 home_wait_ns = 500ULL * NSEC_PER_USEC;

/* How long a claim on a CPU keeps other feeders off it: the time an interrupt and a switch take, generously. */
#define CLAIM_NS	(1ULL * NSEC_PER_MSEC)
/* CPUs looked at for one to displace; each look starts where the last one ended. */
#define VICTIM_TRIES	32
/* Idle CPUs tried one by one on kernels that cannot search within a mask. */
#define IDLE_TRIES	16

/* An idle CPU of @mask that @p may use, nearest to @prev_cpu and marked busy; negative when there is none. */
static s32 pick_idle_cpu(struct task_struct *p, s32 prev_cpu, u64 wake_flags, const struct cpumask *mask)
{
	s32 cpu, i;

	if (__COMPAT_HAS_scx_bpf_select_cpu_and)
		return scx_bpf_select_cpu_and(p, prev_cpu, wake_flags, mask, 0);

	if (bpf_cpumask_test_cpu(prev_cpu, mask) && bpf_cpumask_test_cpu(prev_cpu, p->cpus_ptr) &&
	    scx_bpf_test_and_clear_cpu_idle(prev_cpu))
		return prev_cpu;
	bpf_for(i, 0, IDLE_TRIES) {
		cpu = bpf_cpumask_any_and_distribute(mask, p->cpus_ptr);
		if (cpu >= nr_cpus)
			break;
		if (scx_bpf_test_and_clear_cpu_idle(cpu))
			return cpu;
	}
	return -EBUSY;
}

/* True when what runs on @cctx's CPU is of the class @user, at most, and nobody is about to displace it. */
static __always_inline bool gives_way(const struct cpu_ctx *cctx, enum cpu_user user, u64 now)
{
	return cctx->user != CPU_OTHER && cctx->user <= user && !cctx->taken && !time_before(now, cctx->claimed_until);
}

/* Claims @cpu for a feeder. False when another one was quicker. */
static bool claim(s32 cpu, u64 now)
{
	struct cpu_ctx *cctx = cpu_ctx_of(cpu);
	u64 seen = cctx->claimed_until;

	return !time_before(now, seen) &&
	       __sync_val_compare_and_swap(&cctx->claimed_until, seen, now + CLAIM_NS) == seen;
}

/*
 * Claims a CPU of @mask that @p may use and whose task, of class @user at most,
 * should give way: the previous one, whose caches know @p, else the one whose
 * task has run longest. Negative when there is none; then *@soonest is when the first of the feeders
 * seen there is expected to block.
 */
static s32 pick_victim(struct task_struct *p, const struct cpumask *mask, enum cpu_user user, u64 now, u64 *soonest)
{
	s32 prev_cpu = cpu_of(p), best = -EBUSY, i;
	u64 best_at = 0;

	if (bpf_cpumask_test_cpu(prev_cpu, mask) && bpf_cpumask_test_cpu(prev_cpu, p->cpus_ptr) &&
	    gives_way(cpu_ctx_of(prev_cpu), user, now) && claim(prev_cpu, now))
		return prev_cpu;

	bpf_for(i, 0, VICTIM_TRIES) {
		s32 cpu = bpf_cpumask_any_and_distribute(mask, p->cpus_ptr);
		struct cpu_ctx *cctx;

		if (cpu >= nr_cpus || i >= nr_cpus)
			break;
		cctx = cpu_ctx_of(cpu);
		if (gives_way(cctx, user, now)) {
			if (best < 0 || time_before(cctx->run_at, best_at)) {
				best = cpu;
				best_at = cctx->run_at;
			}
		} else if (cctx->user == CPU_FEEDER && time_before(cctx->feeder_done_at, *soonest)) {
			*soonest = cctx->feeder_done_at;
		}
	}
	return best >= 0 && claim(best, now) ? best : -EBUSY;
}

/*
 * Puts @p, a feeder or supplier with a claim on @cpu, at the head of it for a
 * turn of @turn_ns. For ops.select_cpu(), which returns @cpu.
 */
static __always_inline s32 displace(struct task_struct *p, struct task_ctx *tctx, s32 cpu, u64 turn_ns)
{
	tctx->granted = true;
	scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, turn_ns, SCX_ENQ_PREEMPT);
	return cpu;
}

/*
 * The CPU from which to look for one for @p, a feeder that has no home it may go
 * to: @prev_cpu, as long as that is in the LLC where it was when it was first
 * seen to feed. Its memory is likely to be there, and nothing else would bring
 * it back when all CPUs there were busy for a moment.
 */
static s32 near_cpu(const struct task_struct *p, struct task_ctx *tctx, s32 prev_cpu)
{
	s32 cpu = (s32)tctx->stays_by - 1;

	if (cpu < 0 || !bpf_cpumask_test_cpu(cpu, p->cpus_ptr)) {
		tctx->stays_by = prev_cpu + 1;
		return prev_cpu;
	}
	return llc_of(cpu) == llc_of(prev_cpu) ? prev_cpu : cpu;
}

/*
 * Decides where @p, a feeder that wakes, goes. It is inserted there unless it
 * is to queue, which is left to enqueue_feeder(): it looks once more, since a
 * CPU between two tasks seems to have none that gives way, and it can make a
 * CPU look into the queue after the insertion. Returns the CPU @p wakes on.
 */
static s32 place_feeder(struct task_struct *p, struct task_ctx *tctx, s32 prev_cpu, u64 wake_flags, u64 now)
{
	struct stoker_gpu_stats *stats = &gpu_ctx_of(tctx->gpu)->stats;
	const struct cpumask *home = home_of(tctx->domain);
	bool goes_home = reaches_home(p, tctx->domain), is_idle = false;
	u64 soonest = now + NSEC_PER_SEC;
	s32 cpu;

	count(&stats->wakeups);
	account_waiting(tctx, now);
	tctx->granted = false;

	/* Its user tied it elsewhere, or nobody knows where its GPU is. */
	if (!goes_home && home)
		count_spill(tctx, STOKER_SPILL_AFFINITY);
	/* Without a home it does not go there; the verifier must be told. */
	if (!goes_home || !home) {
		home = p->cpus_ptr;
		prev_cpu = near_cpu(p, tctx, prev_cpu);
	}

	cpu = pick_idle_cpu(p, prev_cpu, wake_flags, home);
	if (cpu >= 0) {
		count(&stats->idle_home);
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, feeder_slice_ns, 0);
		return cpu;
	}

	if (!may_displace(p, tctx, now)) {
		cpu = scx_bpf_select_cpu_dfl(p, prev_cpu, wake_flags, &is_idle);
		if (is_idle) {
			if (goes_home)
				count_spill(tctx, STOKER_SPILL_NO_GRANT);
			scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, feeder_slice_ns, 0);
		}
		return cpu;
	}

	cpu = pick_victim(p, home, CPU_SUPPLIER, now, &soonest);
	if (cpu >= 0) {
		count(&stats->displacements);
		return displace(p, tctx, cpu, feeder_slice_ns);
	}

	/* Home is full of feeders (or of claims and higher classes, which pass as soon). */
	if (!goes_home)
		return prev_cpu;
	if (time_before(soonest, now + home_wait_ns)) {
		count(&stats->waits);
		return prev_cpu;
	}

	cpu = scx_bpf_select_cpu_dfl(p, prev_cpu, wake_flags, &is_idle);
	if (is_idle) {
		count_spill(tctx, STOKER_SPILL_HOME_FULL);
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, feeder_slice_ns, 0);
		return cpu;
	}
	cpu = pick_victim(p, p->cpus_ptr, CPU_SUPPLIER, now, &soonest);
	if (cpu >= 0) {
		count_spill(tctx, STOKER_SPILL_HOME_FULL);
		count(&stats->displacements_away);
		return displace(p, tctx, cpu, feeder_slice_ns);
	}
	count(&stats->waits);
	return prev_cpu;
}

/*
 * Decides where @p, a supplier that wakes, goes: near the GPU it works for, and
 * ahead of ordinary work while that GPU's feeders all wait and their budget has
 * more than half of what it holds, so that suppliers leave feeders theirs.
 */
static s32 place_supplier(struct task_struct *p, struct task_ctx *tctx, s32 prev_cpu, u64 wake_flags, u64 now)
{
	u32 gpu = tctx->supplied_gpu, domain = gpu_domain[gpu % STOKER_MAX_GPUS];
	const struct cpumask *home = home_of(domain);
	bool is_idle = false;
	u64 soonest = 0;
	s32 cpu;

	tctx->granted = false;
	if (!home || !reaches_home(p, domain))
		home = p->cpus_ptr;
	cpu = pick_idle_cpu(p, prev_cpu, wake_flags, home);
	if (cpu >= 0) {
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, slice_ns, 0);
		return cpu;
	}
	if (!(gpu_ctx_of(gpu)->state >> 32) && has_bandwidth(domain, gpu, now) &&
	    domain_ctx_of(budget_domain(domain))->budget_ns > (s64)(budget_depth_ns * domain_cpus(domain) / 2)) {
		cpu = pick_victim(p, home, CPU_ORDINARY, now, &soonest);
		if (cpu >= 0) {
			count(&gpu_ctx_of(gpu)->stats.supplies);
			return displace(p, tctx, cpu, slice_ns);
		}
	}
	cpu = scx_bpf_select_cpu_dfl(p, prev_cpu, wake_flags, &is_idle);
	if (is_idle)
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, slice_ns, 0);
	return cpu;
}

/*
 * Queues @p, a feeder that lost its CPU, may use one CPU only, or is new. It
 * does not move another CPU's task here, since @p may be unable to leave its
 * CPU: it asks a home CPU to come and look, which takes only what it may.
 */
static void enqueue_feeder(struct task_struct *p, struct task_ctx *tctx, u64 enq_flags, u64 now)
{
	struct stoker_gpu_stats *stats = &gpu_ctx_of(tctx->gpu)->stats;
	const struct cpumask *home = home_of(tctx->domain);
	s32 cpu = cpu_of(p), victim;
	struct cpu_ctx *cctx = cpu_ctx_of(cpu);
	u64 soonest = now + NSEC_PER_SEC;

	account_waiting(tctx, now);
	tctx->granted = false;
	if (!may_displace(p, tctx, now)) {
		enqueue_ordinary(p, tctx, enq_flags);
		return;
	}

	/* With one CPU, or none at home, it has nowhere to go but where it is. (The first test is for the verifier.) */
	if (!home || is_pinned(p) || !reaches_home(p, tctx->domain)) {
		u64 preempt;

		if (owes_turn(cpu, cctx, now)) {
			enqueue_ordinary(p, tctx, enq_flags);
			return;
		}
		preempt = gives_way(cctx, CPU_SUPPLIER, now) && claim(cpu, now) ? SCX_ENQ_PREEMPT : 0;
		/* Else select_cpu() counted it. */
		if (enq_flags & SCX_ENQ_WAKEUP && p->nr_cpus_allowed == 1) {
			count(&stats->wakeups);
			if (!is_home(cpu, tctx->domain))
				count_spill(tctx, STOKER_SPILL_AFFINITY);
		}
		if (preempt)
			count(is_home(cpu, tctx->domain) ? &stats->displacements : &stats->displacements_away);
		tctx->granted = true;
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, feeder_slice_ns, enq_flags | preempt);
		return;
	}
	tctx->granted = true;
	enqueue_at_home(p, tctx, enq_flags);
	victim = pick_idle_cpu(p, cpu, 0, home);
	if (victim >= 0) {
		kick(victim, SCX_KICK_IDLE);
		return;
	}
	victim = pick_victim(p, home, CPU_SUPPLIER, now, &soonest);
	if (victim >= 0) {
		count(&stats->displacements);
		kick(victim, SCX_KICK_PREEMPT);
		return;
	}
	/* A home CPU that found the queue empty a moment ago may be about to idle: this one will have looked since. */
	kick(is_home(cpu, tctx->domain) ? cpu : bpf_cpumask_any_and_distribute(home, p->cpus_ptr), SCX_KICK_IDLE);
}
