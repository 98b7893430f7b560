/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the scheduler knows of one thread. It lives in task storage, so it goes
 * with the thread: a recycled PID starts with nothing. It is made when the
 * thread first has to wait, runs for the second time or uses a GPU: many threads
 * end before, to which it would be a good part of what they cost.
 */

/* How often something happens: a count that halves every RATE_HALF_LIFE_NS. */
struct rate {
	u64	at;
	u32	count;			/* in units of 1 / RATE_ONE */
};

/* Homes of which a thread of several GPUs is told apart. */
#define THREAD_HOMES	4

/* By which domains a thread's use of GPUs goes: counts that halve together. See fit.bpf.h. */
struct home_uses {
	u64	at;
	u16	counts[THREAD_HOMES];
	u8	domains[THREAD_HOMES];
};

struct task_ctx {
	/* detect: which GPUs this thread feeds, and how that was seen */
	u64	gpus;			/* bit g: seen to use GPU g */
	u64	known_until;		/* something of what follows may hold until then; 0: nothing. See is_marked() */
	u64	feeder_until;		/* evidence holds until then; a feeder while now < feeder_until */
	u64	doorbell_until;		/* it may submit without system calls: see may_ring() */
	u64	barred_until;		/* its cgroup's owner says that it is no feeder and no supplier */
	u64	relay_until;		/* a kthread that a GPU's interrupt woke: until then it passes that on */
	u64	relay_gpus;
	u64	signed_at;		/* the last of these signs: */
	struct rate uses;		/* signs of GPU work */
	struct home_uses homes;
	u32	evidence;		/* STOKER_EV_* */
	u32	launched_in;		/* the last sample in which it launched work, 0 for none */
	u8	gpu;			/* the GPU it fed last */
	u8	domain;			/* the domain it is placed by: that GPU's, or of several that most used, or STOKER_NO_DOMAIN */
	u8	counted_gpu;		/* the GPU in whose state this thread is counted, or STOKER_NO_GPU */
	u8	waiting;		/* counted there as waiting, else as running */

	/* detect: whom it supplies */
	u64	supplier_until;		/* a supplier while now < supplier_until */
	struct rate wakes;		/* how often it is woken, if a feeder or supplier */
	struct rate supplies;		/* how often it wakes one */
	u8	supplied_gpu;
	u8	depth;			/* 1: wakes a feeder itself */

	/* place */
	u32	stays_by;		/* 1 + the CPU near which it stays as no home tells: see near_cpu(); 0: none yet */

	/* queue */
	u16	llc;			/* the LLC it was last on */
	u16	group;			/* its cgroup's number: see group.bpf.h */
	u16	limited_by;		/* the group for whose budget it waits, or 0 */
	u16	queued_llc;		/* the LLC in whose load it is counted as waiting ... */
	u32	queued_weight;		/* ... with this weight; 0: it is not */
	s64	owes_ns;		/* its vtime, less its place in that queue: see served_at() */
	u8	is_shared;		/* it waits in that LLC's queue, not in one of its own */
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

/*
 * Most threads have nothing to do with a GPU and no cpu.max, and most callbacks
 * need to know only that. So it is told by a bit of the thread itself, the
 * lowest of its vtime, which spares them the look into task storage. It is set
 * and cleared each time that the thread gets a CPU.
 */
#define MARK	1ULL

static __always_inline bool is_marked(const struct task_struct *p)
{
	return p->scx.dsq_vtime & MARK;
}

/* @vtime as it is to be written: with @p's mark. */
static __always_inline u64 with_mark(const struct task_struct *p, u64 vtime)
{
	return (vtime & ~MARK) | (p->scx.dsq_vtime & MARK);
}

static __always_inline void set_vtime(struct task_struct *p, u64 vtime)
{
	vtime = with_mark(p, vtime);
	if (p->scx.dsq_vtime != vtime)
		scx_bpf_task_set_dsq_vtime(p, vtime);
}

/* Marks @p, or not, as @is_special says. */
static __always_inline void sync_mark(struct task_struct *p, bool is_special)
{
	if (is_marked(p) != is_special)
		scx_bpf_task_set_dsq_vtime(p, p->scx.dsq_vtime ^ MARK);
}

/* Something is known of @tctx until @until at least. */
static __always_inline void know(struct task_ctx *tctx, u64 until)
{
	if (!tctx->known_until || time_before(tctx->known_until, until))
		tctx->known_until = until;
}

static __always_inline struct task_ctx *task_ctx_of(struct task_struct *p)
{
	return bpf_task_storage_get(&task_ctxs, p, NULL, 0);
}

/*
 * How often storage of a task or a cgroup is asked for where it must be had:
 * newer kernels allocate it without waiting for a lock, so that it fails now and
 * then though there is memory.
 */
#define STORAGE_TRIES	64

/* Makes what is to be known of @p, which has the group @group; NULL for want of memory, or of luck. */
static struct task_ctx *make_task_ctx(struct task_struct *p, u32 group)
{
	struct task_ctx *tctx = bpf_task_storage_get(&task_ctxs, p, NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);

	if (!tctx)
		return NULL;
	tctx->group = group;
	tctx->gpu = STOKER_NO_GPU;
	tctx->domain = STOKER_NO_DOMAIN;
	tctx->counted_gpu = STOKER_NO_GPU;
	tctx->queued_domain = STOKER_NO_DOMAIN;
	return tctx;
}
