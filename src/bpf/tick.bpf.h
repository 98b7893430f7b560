/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Who weighs how much just now, which sets what CPU time costs.
 *
 * How many have tasks is not counted where tasks wake and sleep, which would
 * write a line of the group's on all CPUs at every switch. A tick every few
 * milliseconds adds up what waits in queues, which is counted as tasks are
 * queued, and what runs, by looking at each CPU, and averages over a few ticks.
 *
 * Groups that may not run, for their cpu.max, are left out at once, and are back
 * at once as what they were: periods of limits are about as long as averages
 * take, so that costs would always be those of the half of the period before.
 */

#define TICK_NS		(4ULL * NSEC_PER_MSEC)
/* While no group is active. */
#define TICK_IDLE_NS	(50ULL * NSEC_PER_MSEC)
/* For each group that is active: a tick is to cost little. */
#define TICK_GROUP_NS	(40ULL * NSEC_PER_USEC)
#define MAX_SHARE_INV	(1ULL << 32)
#define LOAD_ONE	16
#define PRESENCE_ONE	1024

struct tick_timer {
	struct bpf_timer timer;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct tick_timer);
} tick_timers SEC(".maps");

/* What @g weighs among its siblings just now. */
static __always_inline u32 present_weight(const struct group *g)
{
	return g->is_throttled ? 0 : g->weight * g->presence / PRESENCE_ONE;
}

/* Adds up the load of the group @number, after those below it. */
__noinline int tick_load(u32 number)
{
	struct group *g = group_of(number), *parent = group_of(g->parent);
	u32 load = g->running, below = g->below, llc;
	bool has_tasks;

	g->running = 0;
	bpf_for(llc, 0, nr_llcs) {
		struct queued_load *queued = bpf_map_lookup_elem(&queued_loads, &llc);

		if (queued)
			load += queued->weights[number % MAX_GROUPS];
	}
	has_tasks = load || below & BELOW_HAS_TASKS;
	g->is_throttled = is_throttled(number, false) || (!has_tasks && below & BELOW_IS_THROTTLED);
	if (!g->is_throttled) {
		g->kids = g->kids_now;
		g->load_avg = approach(g->load_avg, load * LOAD_ONE);
		g->presence = approach(g->presence, has_tasks ? PRESENCE_ONE : 0);
	}
	g->kids_now = 0;
	g->below = 0;
	if (!g->presence) {
		deactivate(number);
		g->unpaid_ns = 0;
		return 0;
	}
	if (!number)
		return 0;
	parent->kids_now += present_weight(g);
	if (g->is_throttled)
		parent->below |= BELOW_IS_THROTTLED;
	else if (has_tasks)
		parent->below |= BELOW_HAS_TASKS;
	return 0;
}

/* Sets the costs of the group @number, after those above it. */
__noinline int tick_cost(u32 number)
{
	struct group *g = group_of(number), *parent = group_of(g->parent);
	u64 total = g->load_avg / LOAD_ONE + g->kids, share_inv = COST_ONE;

	if (number) {
		/* When a task of it runs it has one, however seldom that is. */
		u32 absence = g->weight - present_weight(g);
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

/*
 * All clocks may go on, for @ns, from where the first of them is, at twice the
 * speed of time. An LLC that for a moment has none but tasks whose turns are
 * dear would else run away to where those are. It would draw others' tasks until
 * their clocks are there, too, which may be seconds later. As it is, it draws
 * them while it has none of its own whose turn it is: see dispatch_balance().
 */
static void free_clocks(u64 ns)
{
	u64 first = llc_ctx_of(0)->vtime_now;
	u32 llc;

	bpf_for(llc, 1, nr_llcs)
		if (time_after(llc_ctx_of(llc)->vtime_now, first))
			first = llc_ctx_of(llc)->vtime_now;
	bpf_for(llc, 0, nr_llcs)
		llc_ctx_of(llc)->vtime_most = first + 2 * ns;
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

/* How long after the last tick the next one is due. */
u64 tick_ns = TICK_NS;

static int on_tick(void *map, int *key, struct bpf_timer *timer)
{
	tick_limits(limit_now(), tick_ns);
	tick_ns = tick_shares();
	free_clocks(tick_ns);
	bpf_timer_start(timer, tick_ns, 0);
	return 0;
}

static int start_ticking(void)
{
	u32 key = 0;
	struct tick_timer *tick = bpf_map_lookup_elem(&tick_timers, &key);

	if (!tick)
		return -ENOENT;
	bpf_timer_init(&tick->timer, &tick_timers, CLOCK_MONOTONIC);
	bpf_timer_set_callback(&tick->timer, on_tick);
	return bpf_timer_start(&tick->timer, tick_ns, 0);
}
