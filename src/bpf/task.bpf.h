/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the scheduler knows of one thread. It lives in task storage, so it goes
 * with the thread: a recycled PID starts with nothing.
 */

/* How often something happens: a count that halves every RATE_HALF_LIFE_NS. */
struct rate {
	u64	at;
	u32	count;			/* in units of 1 / RATE_ONE */
};

struct task_ctx {
	/* detect: which GPUs this thread feeds, and how that was seen */
	u64	gpus;			/* bit g: seen to use GPU g */
	u64	feeder_until;		/* evidence holds until then; a feeder while now < feeder_until */
	u64	doorbell_until;		/* it may submit without system calls: see may_ring() */
	u64	barred_until;		/* its cgroup's owner says that it is no feeder and no supplier */
	u64	relay_until;		/* a kthread that a GPU's interrupt woke: until then it passes that on */
	u64	relay_gpus;
	u64	signed_at;		/* the last of these signs: */
	struct rate uses;		/* signs of GPU work */
	u32	evidence;		/* STOKER_EV_* */
	u8	gpu;			/* the GPU it fed last */
	u8	domain;			/* that GPU's domain, or STOKER_NO_DOMAIN */
	u8	counted_gpu;		/* the GPU in whose state this thread is counted, or STOKER_NO_GPU */
	u8	waiting;		/* counted there as waiting, else as running */

	/* detect: whom it supplies */
	u64	supplier_until;		/* a supplier while now < supplier_until */
	struct rate wakes;		/* how often it is woken, if a feeder or supplier */
	struct rate supplies;		/* how often it wakes one */
	u8	supplied_gpu;
	u8	depth;			/* 1: wakes a feeder itself */

	/* queue */
	u16	llc;			/* the LLC whose clock p->scx.dsq_vtime is read by */
	u8	queued_domain;		/* the domain in whose feeder queue it is, or STOKER_NO_DOMAIN */
	u8	granted;		/* it runs, or is to run, by a feeder's grant */

	/* account */
	u64	wait_since;		/* runnable since, 0 when not waiting */
	u64	avg_run_ns;		/* usual length of a run, wake-up to block: (7 * avg + run) / 8 */
	u64	run_ns;			/* CPU time since it last woke */
	u32	epoch;			/* the last one in which it was counted as a feeder */
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct task_ctx);
} task_ctxs SEC(".maps");

static __always_inline struct task_ctx *task_ctx_of(struct task_struct *p)
{
	return bpf_task_storage_get(&task_ctxs, p, NULL, 0);
}
