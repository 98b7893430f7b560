/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What a nanosecond of CPU time costs a task in vtime.
 *
 * A task's due share of the machine is the product, over the levels of the
 * cgroup tree, of a group's weight over that of all at its level that have
 * tasks, and last its own weight over that of its group's tasks. What it uses
 * costs 1 / (share * CPUs) in vtime. So one queue ordered by vtime serves the
 * whole tree, all queues of a busy machine go by one clock, and that clock is
 * as fast as time itself.
 *
 * How many have tasks is not counted where tasks wake and sleep, which would
 * write a line of the group's on all CPUs at every switch. A tick every few
 * milliseconds adds up what waits in queues, which is counted as tasks are
 * queued, and what runs, by looking at each CPU, and averages over a few ticks.
 */

/* The shortest: of tasks that whole turns would let wait for longer than a round, and when a limit is near. */
#define MIN_TURN_NS	(500ULL * NSEC_PER_USEC)
#define ROUND_NS	(100ULL * NSEC_PER_MSEC)
/* CPUs that tasks are scheduled on. */
const volatile u32 nr_online = 1;

#define TICK_NS		(4ULL * NSEC_PER_MSEC)
/* While nothing is active, and for each group that is: a tick is to cost little. */
#define TICK_IDLE_NS	(50ULL * NSEC_PER_MSEC)
#define TICK_GROUP_NS	(40ULL * NSEC_PER_USEC)
#define COST_SHIFT	10
#define COST_ONE	(1ULL << COST_SHIFT)
#define MAX_SHARE_INV	(1ULL << 32)
#define LOAD_ONE	16
#define PRESENCE_ONE	1024
/* Averages move by one part in so many at a tick. */
#define AVERAGE_OVER	8

struct tick_timer {
	struct bpf_timer timer;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct tick_timer);
} tick_timers SEC(".maps");

/* What a nanosecond costs @p, of @group: by its part of its group's load, or, if it weighs more, by all of its share. */
static __always_inline u64 cost_of(const struct task_struct *p, u32 group)
{
	const struct group *g = group_of(group);
	u64 cost = g->cost_each / p->scx.weight;

	return cost < g->cost_own ? g->cost_own : cost;
}

/* A turn of @turn_ns, made shorter if paying for it, at @cost each nanosecond, would take longer than a round. */
static __always_inline u64 affordable_turn(u64 turn_ns, u64 cost)
{
	if (cost * turn_ns <= ROUND_NS << COST_SHIFT)
		return turn_ns;
	turn_ns = (ROUND_NS << COST_SHIFT) / cost;
	return turn_ns > MIN_TURN_NS ? turn_ns : MIN_TURN_NS;
}

/* What costs are until the first tick: as if every task were due one CPU. */
static void set_first_costs(struct group *g)
{
	g->share_inv = COST_ONE;
	g->cost_own = COST_ONE / nr_online;
	g->cost_each = COST_ONE * WEIGHT_DEFAULT;
}

static void set_group_weight(struct group *g, u32 weight, bool is_idle)
{
	g->is_idle = is_idle;
	g->weight = is_idle ? WEIGHT_IDLE : weight ?: WEIGHT_DEFAULT;
}

/* Numbers @cgrp, with what it weighs. Returns its parent's number, and counts it as lost, when there is none left. */
static u32 make_group(struct cgroup *cgrp, u32 weight)
{
	u32 parent = parent_of(cgrp), level = group_of(parent)->level + 1;
	u32 number = level < MAX_LEVELS ? take_number() : 0;
	struct group *g = group_of(number);

	if (!number) {
		groups_lost++;
		return parent;
	}
	g->parent = parent;
	g->level = level;
	if (level >= levels_end)
		levels_end = level + 1;
	g->limit = group_of(parent)->limit;
	g->load_avg = g->presence = g->kids = g->kids_now = 0;
	g->has_kids = false;
	set_group_weight(g, weight, false);
	set_first_costs(g);
	return number;
}

/* Moves @average towards @value. */
static __always_inline u32 approach(u32 average, u32 value)
{
	/* Rounded away from the average, so that it gets there. */
	if (value > average)
		return average + (value - average + AVERAGE_OVER - 1) / AVERAGE_OVER;
	return average - (average - value + AVERAGE_OVER - 1) / AVERAGE_OVER;
}

/* Adds up the load of the group @number, after those below it. */
__noinline int tick_load(u32 number)
{
	struct group *g = group_of(number), *parent = group_of(g->parent);
	u32 load = g->running, llc;
	bool has_tasks;

	g->running = 0;
	bpf_for(llc, 0, nr_llcs) {
		struct queued_load *queued = bpf_map_lookup_elem(&queued_loads, &llc);

		if (queued)
			load += queued->weights[number % MAX_GROUPS];
	}
	has_tasks = load || g->has_kids;
	g->has_kids = false;
	g->kids = g->kids_now;
	g->kids_now = 0;
	g->load_avg = approach(g->load_avg, load * LOAD_ONE);
	g->presence = approach(g->presence, has_tasks ? PRESENCE_ONE : 0);
	if (!g->presence) {
		deactivate(number);
		return 0;
	}
	if (!number)
		return 0;
	parent->kids_now += g->weight * g->presence / PRESENCE_ONE;
	if (has_tasks)
		parent->has_kids = true;
	return 0;
}

/* Sets the costs of the group @number, after those above it. */
__noinline int tick_cost(u32 number)
{
	struct group *g = group_of(number), *parent = group_of(g->parent);
	u64 total = g->load_avg / LOAD_ONE + g->kids, share_inv = COST_ONE;

	if (number) {
		/* When a task of it runs it has one, however seldom that is. */
		u32 absence = g->weight - g->weight * g->presence / PRESENCE_ONE;
		u64 all = parent->load_avg / LOAD_ONE + parent->kids + absence;

		share_inv = parent->share_inv * all / (g->weight ?: 1);
		if (share_inv > MAX_SHARE_INV)
			share_inv = MAX_SHARE_INV;
		if (share_inv < COST_ONE)
			share_inv = COST_ONE;
	}
	g->share_inv = share_inv;
	g->cost_own = share_inv / nr_online ?: 1;
	total *= share_inv / nr_online ?: 1;
	g->cost_each = total < MAX_SHARE_INV * WEIGHT_DEFAULT ? total : MAX_SHARE_INV * WEIGHT_DEFAULT;
	return 0;
}

/* Ticks each active group of @level: its cost if @sets_cost, else its load. Returns how many there are. */
__noinline u32 tick_level(u32 level, u32 sets_cost)
{
	u32 words = (groups_end + 63) / 64, number, word, i, nr = 0;

	bpf_for(word, 0, words) {
		u64 bits = active_groups[level % MAX_LEVELS][word % GROUP_WORDS];

		for_each_group(number, i, word, bits) {
			nr++;
			if (sets_cost)
				tick_cost(number);
			else
				tick_load(number);
		}
	}
	return nr;
}

/* Looks at what runs and waits, and sets what CPU time costs. Returns when to do so again, in nanoseconds. */
static u64 tick_shares(void)
{
	u64 now = scx_bpf_now();
	u32 cpu, level, nr = 0;

	bpf_for(cpu, 0, nr_cpus) {
		struct cpu_ctx *cctx = cpu_ctx_of(cpu);

		if (cctx->user == CPU_OTHER)
			continue;
		group_of(cctx->group)->running += cctx->weight;
		look_at_run(cpu, cctx, now);
	}
	bpf_for(level, 0, levels_end)
		nr += tick_level(levels_end - 1 - level, false);
	bpf_for(level, 0, levels_end)
		tick_level(level, true);
	return !nr ? TICK_IDLE_NS : nr * TICK_GROUP_NS > TICK_NS ? nr * TICK_GROUP_NS : TICK_NS;
}
