/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The cgroup tree as the cpu controller has it: groups with a number each, the
 * root's being 0. A task carries its group's number, so that what is needed at
 * every switch is an array's element away. A group that finds no number free
 * counts as its parent.
 */

/*
 * Functions of this and the two next files that loop and take numbers only are
 * not static: so the verifier looks at each once, and not in all places that call
 * it. Older kernels want such a function to return a number.
 */
#define MAX_GROUPS	STOKER_MAX_GROUPS
#define GROUP_WORDS	(MAX_GROUPS / 64)
#define MAX_LEVELS	STOKER_MAX_LEVELS
#define WEIGHT_DEFAULT	100		/* of a group by cpu.weight, of a task by nice 0 */
/* What SCHED_IDLE is to a nice 0 task in the kernel's own scheduler: 3 / 1024. */
#define WEIGHT_IDLE	1

struct group {
	/* Read at every switch of a task of it: see cost_of(). */
	u64	cost_each;
	u64	cost_own;
	u32	weight;
	u16	parent;
	u16	limit;			/* the nearest group, itself or above, that has a cpu.max; 0: none */
	u8	level;
	u8	is_idle;		/* cpu.idle */
	u8	is_used;		/* the number is taken */
	u8	is_active;		/* it is among active_groups */
	u8	is_throttled;		/* none of its ordinary tasks may run: as the tick saw it, like what follows */
	u8	below;			/* BELOW_*: what is so of groups below, being gathered */

	/* The tick's own: see tick.bpf.h. */
	u32	running;		/* weights of its tasks that run now */
	u32	load_avg;		/* weights of its tasks that run or wait, in 1 / LOAD_ONE, of late */
	u32	presence;		/* how much of the time it has some, itself or below, of PRESENCE_ONE */
	u32	kids_now;		/* weights of the groups below by their presence, being added up */
	u32	kids;			/* the sum */
	u32	unpaid_ns;		/* CPU time that its tasks leave unpaid when they end, of late: see leave_unpaid() */
	u64	share_inv;		/* 1 / (its share of the machine), in 1 / COST_ONE */
} __attribute__((aligned(CACHE_LINE)));

#define BELOW_HAS_TASKS		1
#define BELOW_IS_THROTTLED	2

struct group groups[MAX_GROUPS];
/* As many. A variable to the compiler, which would else leave bounds checks out that the verifier wants. */
const volatile u32 nr_numbers = MAX_GROUPS;
/* Groups with tasks that ran or waited a moment ago, by level, as bits. */
u64 active_groups[MAX_LEVELS][GROUP_WORDS];
/* Numbers were never taken from here on. */
u32 groups_end = 1;
/* No group was ever at a level from here on. */
u32 levels_end = 1;
/* Groups that found no number free: user space says so, once. */
u64 groups_lost;

struct group_number {
	u32	number;
};

struct {
	__uint(type, BPF_MAP_TYPE_CGRP_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct group_number);
} group_numbers SEC(".maps");

/* The weights of tasks that wait, by LLC and group. */
struct queued_load {
	u32	weights[MAX_GROUPS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, STOKER_MAX_LLCS);	/* user space lowers it to what there are */
	__type(key, u32);
	__type(value, struct queued_load);
} queued_loads SEC(".maps");

static __always_inline struct group *group_of(u32 number)
{
	return &groups[number % MAX_GROUPS];
}

static u32 number_of(struct cgroup *cgrp)
{
	struct group_number *known = bpf_cgrp_storage_get(&group_numbers, cgrp, NULL, 0);

	return known ? known->number % MAX_GROUPS : 0;
}

/* The group above @cgrp, or 0. */
static u32 parent_of(struct cgroup *cgrp)
{
	struct cgroup *parent;
	u32 number = 0;

	if (cgrp->level <= 0)
		return 0;
	parent = bpf_cgroup_ancestor(cgrp, cgrp->level - 1);
	if (parent) {
		number = number_of(parent);
		bpf_cgroup_release(parent);
	}
	return number;
}

/* The number that @cgrp has to itself; 0 when it is the root, or counts as its parent. */
static u32 own_number_of(struct cgroup *cgrp)
{
	u32 number = number_of(cgrp);

	return number == parent_of(cgrp) ? 0 : number;
}

/* Whether the kernel can be asked for a task's cgroup: a few were built so that it cannot, as for kick(). */
#define KNOWS_CGROUPS	bpf_ksym_exists(scx_bpf_task_cgroup___new)

/* The group of @p, the task that a callback is about; the root's where nobody can tell. */
static u32 group_of_task(struct task_struct *p)
{
	struct cgroup *cgrp = scx_bpf_task_cgroup(p);
	u32 number;

	if (!cgrp)
		return 0;
	number = number_of(cgrp);
	bpf_cgroup_release(cgrp);
	return number;
}

/* What is known of @p, the task that a callback is about, made if there is nothing; NULL as make_task_ctx(). */
static __always_inline struct task_ctx *need_task_ctx(struct task_struct *p)
{
	return task_ctx_of(p) ?: make_task_ctx(p, group_of_task(p));
}

/* The same of the current task, for hooks outside of callbacks. */
static __always_inline struct task_ctx *need_current_ctx(void)
{
	struct task_struct *p = bpf_get_current_task_btf();
	const struct cpu_ctx *cctx = cpu_ctx_of(bpf_get_smp_processor_id());

	return task_ctx_of(p) ?: make_task_ctx(p, cctx->user == CPU_OTHER ? 0 : cctx->group);
}

/*
 * Runs what follows for each of the 64 @groups from @word * 64 on whose bit is
 * set in @bits, which is used up: @number is the group, @i counts.
 */
#define for_each_group(number, i, word, bits)					\
	bpf_for(i, 0, 64)							\
		if (!(bits))							\
			break;							\
		else if (((number) = (word) * 64 + lowest_bit(bits)), (bits) &= (bits) - 1, true)

/* A number that is free, taken; 0 when there is none. The kernel has groups come and go one at a time. */
__noinline u32 take_number(void)
{
	u32 i;

	bpf_for(i, 1, nr_numbers) {
		if (group_of(i)->is_used)
			continue;
		group_of(i)->is_used = true;
		if (i >= groups_end)
			groups_end = i + 1;
		return i;
	}
	return 0;
}

/* Puts @number and the groups above it among those that have tasks. */
__noinline int activate(u32 number)
{
	u32 i;

	bpf_for(i, 0, MAX_LEVELS) {
		struct group *g = group_of(number);

		if (g->is_active)
			break;
		g->is_active = true;
		__sync_fetch_and_or(&active_groups[g->level % MAX_LEVELS][number / 64 % GROUP_WORDS], 1ULL << (number % 64));
		if (!number)
			break;
		number = g->parent;
	}
	return 0;
}

/* Takes @number out of those again. In this order: who finds it inactive puts it back. */
static void deactivate(u32 number)
{
	struct group *g = group_of(number);

	__sync_fetch_and_and(&active_groups[g->level % MAX_LEVELS][number / 64 % GROUP_WORDS], ~(1ULL << (number % 64)));
	g->is_active = false;
}

/* @tctx's task is in no queue any more. */
static __always_inline void left_queue(struct task_ctx *tctx)
{
	struct queued_load *queued;
	u32 llc = tctx->queued_llc;

	if (!tctx->queued_weight)
		return;
	queued = bpf_map_lookup_elem(&queued_loads, &llc);
	if (queued)
		__sync_fetch_and_add(&queued->weights[tctx->group % MAX_GROUPS], -tctx->queued_weight);
	if (tctx->is_shared)
		__sync_fetch_and_add(&llc_ctx_of(llc)->nr_waiting, -1);
	tctx->queued_weight = 0;
}

/*
 * @p is to wait in a queue of @llc, the one that its CPUs share or another.
 * Counted before the kernel inserts, and until @p has left the queue: so who
 * looks too early finds the queue empty, but never the count wrong. Returns what
 * those of its group weigh that wait in @llc already.
 */
static __always_inline u32 note_queued(const struct task_struct *p, struct task_ctx *tctx, u32 llc, bool is_shared)
{
	struct queued_load *queued = bpf_map_lookup_elem(&queued_loads, &llc);

	left_queue(tctx);
	if (!queued)
		return 0;
	tctx->queued_weight = p->scx.weight;
	tctx->queued_llc = llc;
	tctx->is_shared = is_shared;
	if (is_shared)
		__sync_fetch_and_add(&llc_ctx_of(llc)->nr_waiting, 1);
	if (!group_of(tctx->group)->is_active)
		activate(tctx->group);
	return __sync_fetch_and_add(&queued->weights[tctx->group % MAX_GROUPS], tctx->queued_weight);
}
