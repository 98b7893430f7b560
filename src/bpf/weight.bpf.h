/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What a nanosecond of CPU time costs a task in vtime: less the more it weighs.
 * A task's weight is its own (nice) times that of its cgroup; both are 100 by
 * default. Group weights are looked up only once some group has another one.
 */

#define WEIGHT_DEFAULT	100

/* The longest turn of an ordinary task. */
const volatile u64 slice_ns = 5ULL * NSEC_PER_MSEC;

struct group_ctx {
	u32	weight;
};

struct {
	__uint(type, BPF_MAP_TYPE_CGRP_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct group_ctx);
} group_ctxs SEC(".maps");

/* Set for good when a group's weight is not the default. */
bool groups_are_weighted;

static int set_group_weight(struct cgroup *cgrp, u32 weight)
{
	struct group_ctx *gctx;

	gctx = bpf_cgrp_storage_get(&group_ctxs, cgrp, NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!gctx)
		return -ENOMEM;
	gctx->weight = weight;
	if (weight != WEIGHT_DEFAULT)
		groups_are_weighted = true;
	return 0;
}

static __noinline u32 group_weight_of(struct task_struct *p)
{
	struct cgroup *cgrp = scx_bpf_task_cgroup(p);
	struct group_ctx *gctx;
	u32 weight = WEIGHT_DEFAULT;

	if (!cgrp)
		return weight;
	gctx = bpf_cgrp_storage_get(&group_ctxs, cgrp, NULL, 0);
	if (gctx && gctx->weight)
		weight = gctx->weight;
	bpf_cgroup_release(cgrp);
	return weight;
}

/* The vtime that @p pays for @run_ns of CPU time. */
static __always_inline u64 vtime_of(struct task_struct *p, u64 run_ns)
{
	u64 vtime = run_ns;

	if (p->scx.weight != WEIGHT_DEFAULT)
		vtime = vtime * WEIGHT_DEFAULT / p->scx.weight;
	if (groups_are_weighted)
		vtime = vtime * WEIGHT_DEFAULT / group_weight_of(p);
	return vtime;
}
