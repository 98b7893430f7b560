/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What a nanosecond of CPU time costs a task in vtime.
 *
 * A task's due share of the machine is the product, over the levels of the
 * cgroup tree, of a group's weight over that of all at its level that have
 * tasks, and last its own weight over that of its group's tasks. What it uses
 * costs 1 / (share * CPUs) in vtime. So one queue ordered by vtime serves the
 * whole tree, all queues of a busy machine go by one clock, and that clock is
 * as fast as time itself. What all weigh the tick adds up: tick.bpf.h.
 */

/* The shortest: of tasks that whole turns would let wait for longer than a round, and when a limit is near. */
#define MIN_TURN_NS	(500ULL * NSEC_PER_USEC)
#define ROUND_NS	(100ULL * NSEC_PER_MSEC)
/* CPUs that tasks are scheduled on. */
const volatile u32 nr_online = 1;

#define COST_SHIFT	10
#define COST_ONE	(1ULL << COST_SHIFT)
/* Averages move by one part in so many each time. */
#define AVERAGE_OVER	8

/* Moves @average towards @value. */
static __always_inline u32 approach(u32 average, u32 value)
{
	/* Rounded away from the average, so that it gets there. */
	if (value > average)
		return average + (value - average + AVERAGE_OVER - 1) / AVERAGE_OVER;
	return average - (average - value + AVERAGE_OVER - 1) / AVERAGE_OVER;
}

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

/* cpu.idle of @cgrp. The kernel tells when that changes, but not what it is when the scheduler starts. */
static bool says_idle(const struct cgroup *cgrp)
{
	const struct cgroup_subsys_state *css;
	const struct task_group *tg;

	css = cgrp->subsys[bpf_core_enum_value(enum cgroup_subsys_id, cpu_cgrp_id)];
	tg = bpf_core_cast(css, struct task_group);
	return bpf_core_field_exists(tg->idle) && tg->idle;
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
	g->is_throttled = g->below = 0;
	g->unpaid_ns = 0;
	set_group_weight(g, weight, says_idle(cgrp));
	set_first_costs(g);
	return number;
}
