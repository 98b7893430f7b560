/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * cpu.max: what a group and all below it may use in a period. What they use is
 * taken from the budgets of all limited groups above. A task of a group that
 * has none left waits in a queue of its group's until the tick refills it; what
 * was used beyond is a debt, so that the limit holds exactly over time. Within
 * a limit feeders come first: ordinary tasks leave what feeders of the group
 * used to need in a period.
 */

struct limit {
	u64	quota_ns;		/* in each period; 0: no limit */
	u64	period_ns;
	u64	burst_ns;		/* what may be saved beyond a period's quota */
	u64	refill_at;
	s64	budget_ns;		/* left in this period; below 0: a debt */
	u64	feeder_used_ns;		/* by feeders in this period */
	u64	feeder_need_ns;		/* ... usually */
	u32	nr_waiting;		/* tasks in its queue, or about to be */
	u32	was_short;		/* a task had to wait in this period */
} __attribute__((aligned(CACHE_LINE)));

struct limit limits[MAX_GROUPS];
u64 limited_groups[GROUP_WORDS];	/* those with a quota, as bits */
u64 ready_groups[GROUP_WORDS];		/* those of them with waiting tasks and budget again */
/* While these are 0 no CPU looks at any of them. */
u32 nr_ready_groups;
struct stoker_limit_stats limit_stats;

static __always_inline struct limit *limit_of(u32 number)
{
	return &limits[number % MAX_GROUPS];
}

/*
 * What periods go by. Where the kernel does not trust the hardware's clock,
 * scx_bpf_now() stands still on an idle CPU with tasks that may not run.
 */
static __always_inline u64 limit_now(void)
{
	return bpf_ktime_get_ns();
}

static __always_inline u64 limit_queue(u32 number)
{
	return QUEUE_LIMITS + number;
}

/* The limited group next above the limited group @number; 0: none. */
static __always_inline u32 limit_above(u32 number)
{
	return group_of(group_of(number)->parent)->limit;
}

/* Takes @run_ns of a task's CPU time out of all limits that hold for it. @number is the nearest one. */
__noinline int charge_limits(u32 number, u64 run_ns, u32 feeds)
{
	u32 i;

	bpf_for(i, 0, MAX_LEVELS) {
		if (!number)
			break;
		__sync_fetch_and_add(&limit_of(number)->budget_ns, -(s64)run_ns);
		if (feeds)
			__sync_fetch_and_add(&limit_of(number)->feeder_used_ns, run_ns);
		number = limit_above(number);
	}
	return 0;
}

/* What a task under the limit @number may still use in this period: the least of all that hold. */
__noinline s64 budget_left(u32 number, u32 feeds)
{
	s64 left = NSEC_PER_SEC;
	u32 i;

	bpf_for(i, 0, MAX_LEVELS) {
		struct limit *limit = limit_of(number);
		s64 own = limit->budget_ns;

		if (!number)
			break;
		if (!feeds && limit->feeder_need_ns > limit->feeder_used_ns)
			own -= limit->feeder_need_ns - limit->feeder_used_ns;
		if (own < left)
			left = own;
		number = limit_above(number);
	}
	return left;
}

/* True when a task of @group may not run now. */
static __always_inline bool is_throttled(u32 group, bool feeds)
{
	u32 limit = group_of(group)->limit;

	return limit && budget_left(limit, feeds) <= 0;
}

/* @tctx's task is in no limit's queue any more. */
static __always_inline void left_limit(struct task_ctx *tctx)
{
	if (!tctx->limited_by)
		return;
	__sync_fetch_and_add(&limit_of(tctx->limited_by)->nr_waiting, -1);
	tctx->limited_by = 0;
}

/* Has @p wait for its group's budget if there is none now. True if so. */
static bool throttle(struct task_struct *p, struct task_ctx *tctx, bool feeds, u64 enq_flags)
{
	u32 number = group_of(tctx->group)->limit;
	u64 vtime = p->scx.dsq_vtime;

	if (!is_throttled(tctx->group, feeds))
		return false;
	left_queue(tctx);
	left_limit(tctx);
	tctx->limited_by = number;
	limit_of(number)->was_short = true;
	__sync_fetch_and_add(&limit_of(number)->nr_waiting, 1);
	/* Feeders first: no other task's vtime is that far behind. */
	if (feeds)
		vtime = with_mark(p, vtime - NSEC_PER_SEC);
	scx_bpf_dsq_insert_vtime(p, limit_queue(number), slice_ns, vtime, enq_flags);
	return true;
}

/* What a turn of @turn_ns under the limit @number is cut to: its part of what is left. */
static u64 limited_turn(u64 turn_ns, u32 number, bool feeds)
{
	s64 most = budget_left(number, feeds) / (s64)nr_online;

	if (most < (s64)MIN_TURN_NS)
		most = MIN_TURN_NS;
	return turn_ns < (u64)most ? turn_ns : most;
}

/* Takes a task of a group that has budget again. It has not run for long: it need not queue by vtime. */
__noinline u32 dispatch_limited(void)
{
	u32 words = (groups_end + 63) / 64, number, word, i;

	bpf_for(word, 0, words) {
		u64 bits = ready_groups[word % GROUP_WORDS];

		for_each_group(number, i, word, bits) {
			if (limit_of(number)->nr_waiting && budget_left(number, true) > 0) {
				if (scx_bpf_dsq_move_to_local(limit_queue(number), 0))
					return true;
				continue;
			}
			if (__sync_fetch_and_and(&ready_groups[word % GROUP_WORDS], ~(1ULL << (number % 64))) &
			    (1ULL << (number % 64)))
				__sync_fetch_and_add(&nr_ready_groups, -1);
		}
	}
	return false;
}

/* Gives the limit @number what is due by @now. Ticks are to be @tick_ns apart. */
__noinline int refill(u32 number, u64 now, u64 tick_ns)
{
	struct limit *limit = limit_of(number);
	u64 periods, due, at_once;
	s64 most = limit->quota_ns + limit->burst_ns;

	if (!limit->quota_ns || !limit->period_ns || time_before(now, limit->refill_at))
		return 0;
	periods = (now - limit->refill_at) / limit->period_ns + 1;
	limit->refill_at += periods * limit->period_ns;
	due = periods * limit->quota_ns;
	/*
	 * What is not used is lost, but for the burst, and but for the periods between two ticks, of which the later
	 * may be late: who was out of budget could not use those.
	 */
	at_once = 2 * tick_ns / limit->period_ns * limit->quota_ns;
	if (at_once > due)
		at_once = due;
	if (most < (s64)at_once)
		most = at_once;
	if (limit->budget_ns + (s64)due > most)
		due = most - limit->budget_ns;
	__sync_fetch_and_add(&limit->budget_ns, due);
	limit->feeder_need_ns = (3 * limit->feeder_need_ns + limit->feeder_used_ns / periods) / 4;
	if (limit->feeder_need_ns > limit->quota_ns)
		limit->feeder_need_ns = limit->quota_ns;
	limit->feeder_used_ns = 0;
	limit_stats.periods += periods;
	if (limit->was_short) {
		limit_stats.throttled_periods += periods;
		limit->was_short = false;
	}
	return 0;
}

/*
 * Has idle CPUs look at the queue of the limit @number if tasks wait in it that
 * may run again: for each of them one that it can run on.
 */
__noinline int release_waiting(u32 number)
{
	u64 bit = 1ULL << (number % 64);
	struct task_struct *p;
	u32 nr = 0;

	if (!limit_of(number)->nr_waiting || budget_left(number, true) <= 0)
		return 0;
	if (!(__sync_fetch_and_or(&ready_groups[number / 64 % GROUP_WORDS], bit) & bit))
		__sync_fetch_and_add(&nr_ready_groups, 1);
	/* Where it cannot be had, CPUs cannot be kicked either: see kick(). */
	if (!bpf_ksym_exists(bpf_iter_scx_dsq_new))
		return 0;
	/* The verifier of older kernels wants it said. */
	bpf_rcu_read_lock();
	bpf_for_each(scx_dsq, p, limit_queue(number), 0) {
		s32 cpu = scx_bpf_pick_idle_cpu(p->cpus_ptr, 0);

		if (cpu >= 0)
			kick(cpu, SCX_KICK_IDLE);
		if (++nr >= nr_cpus)
			break;
	}
	bpf_rcu_read_unlock();
	return 0;
}

/* Refills what is due and releases those that waited for it. Ticks are to be @tick_ns apart. */
__noinline int tick_limits(u64 now, u64 tick_ns)
{
	u32 words = (groups_end + 63) / 64, number, word, i, pass;

	bpf_for(pass, 0, 2)
		bpf_for(word, 0, words) {
			u64 bits = limited_groups[word % GROUP_WORDS];

			for_each_group(number, i, word, bits) {
				/* All first: who waits here may wait for one above. */
				if (!pass)
					refill(number, now, tick_ns);
				else
					release_waiting(number);
			}
		}
	return 0;
}

/* The nearest limited group of @number, itself or above. */
__noinline u32 nearest_limit(u32 number)
{
	u32 i;

	bpf_for(i, 0, MAX_LEVELS) {
		if (!number || limit_of(number)->quota_ns)
			break;
		number = group_of(number)->parent;
	}
	return number;
}

/* Sets cpu.max of the group @number. A quota of 0 is none. */
static void set_limit(u32 number, u64 quota_ns, u64 period_ns, u64 burst_ns)
{
	struct limit *limit = limit_of(number);
	u64 bit = 1ULL << (number % 64);
	u32 i;

	if (!number)
		return;
	if (!quota_ns)
		period_ns = burst_ns = 0;
	if (limit->quota_ns == quota_ns && limit->period_ns == period_ns && limit->burst_ns == burst_ns)
		return;
	limit->period_ns = period_ns;
	limit->burst_ns = burst_ns;
	limit->quota_ns = quota_ns;
	/* Whoever still waits for a limit that is no more is not to wait. */
	limit->budget_ns = quota_ns ?: NSEC_PER_SEC;
	limit->refill_at = limit_now() + period_ns;
	if (quota_ns)
		__sync_fetch_and_or(&limited_groups[number / 64 % GROUP_WORDS], bit);
	bpf_for(i, 1, groups_end)
		if (group_of(i)->is_used)
			group_of(i)->limit = nearest_limit(i);
	/* ... and the tick finds it there. */
	if (!quota_ns && !limit->nr_waiting)
		__sync_fetch_and_and(&limited_groups[number / 64 % GROUP_WORDS], ~bit);
}

/* The same as the kernel tells it: in microseconds, with the largest number for no quota. */
static void set_limit_us(u32 number, u64 period_us, u64 quota_us, u64 burst_us)
{
	u64 quota_ns = quota_us == ~0ULL ? 0 : quota_us * NSEC_PER_USEC;

	set_limit(number, quota_ns, period_us * NSEC_PER_USEC, burst_us * NSEC_PER_USEC);
}

/* How often cpu.max, cpu.max.burst or cpu.idle of a group was written: user space reads them then. */
u64 limit_writes;

/*
 * A file of a cgroup was written. Where the kernel tells of limits by callback
 * this is not attached.
 */
SEC("fexit/cgroup_file_write")
int BPF_PROG(stoker_cgroup_written, struct kernfs_open_file *of)
{
	const struct cftype *file = bpf_core_cast(of->kn->priv, struct cftype);

	if (file->ss && file->ss->id == bpf_core_enum_value(enum cgroup_subsys_id, cpu_cgrp_id) &&
	    (file->name[0] == 'm' || file->name[0] == 'i'))
		__sync_fetch_and_add(&limit_writes, 1);
	return 0;
}

/* User space tells of cpu.max and cpu.idle where the kernel does not. */
SEC("syscall")
int set_group(struct stoker_group_report *report)
{
	struct cgroup *cgrp = bpf_cgroup_from_id(report->cgroup);
	u32 number;

	report->ret = -ENOENT;
	if (!cgrp)
		return 0;
	number = own_number_of(cgrp);
	if (number) {
		if (group_of(number)->is_idle != report->is_idle)
			set_group_weight(group_of(number), 0, report->is_idle);
		set_limit(number, report->quota_ns, report->period_ns, report->burst_ns);
		report->ret = 0;
	}
	bpf_cgroup_release(cgrp);
	return 0;
}
