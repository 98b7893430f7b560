/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The machine as user space found it, and the scheduler's own state of each
 * part of it. What user space writes before loading is constant to the
 * verifier; the rest is indexed by CPU, LLC, domain or GPU, one cache line or
 * more each, so that CPUs do not share lines they write on every switch.
 */

const volatile u32 nr_cpus = 1;		/* CPU ids are below this */
const volatile u32 nr_llcs = 1;
const volatile u32 nr_domains = 0;

const volatile struct stoker_cpu cpus[STOKER_MAX_CPUS];

/* For each LLC the others, nearest first: the order in which its idle CPUs steal. */
const volatile u16 steal_order[STOKER_MAX_LLCS][STOKER_MAX_LLCS];

/* The domain of each GPU, or STOKER_NO_DOMAIN where its home is unknown. */
const volatile u8 gpu_domain[STOKER_MAX_GPUS];
const volatile u32 domain_nr_cpus[STOKER_MAX_DOMAINS];

#define CACHE_LINE 128			/* two of 64 bytes: x86 fetches them in pairs */

enum cpu_user {
	CPU_OTHER,			/* idle, or a task of another scheduling class */
	CPU_ORDINARY,
	CPU_SUPPLIER,
	CPU_FEEDER,
};

struct cpu_ctx {
	u64	run_sum_ns;		/* the current task's sum_exec_runtime when it got the CPU */
	u64	run_at;			/* when it got the CPU */
	u64	irq_gpus;		/* the GPUs whose interrupt it handles right now, as bits */
	u64	claimed_until;		/* a feeder is on its way to displace the current task */
	u64	pinned_vtime;		/* the vtime of the first of them */
	u64	feeders_since;		/* since when only feeders ran, 0 after an ordinary task */
	u64	feeder_done_at;		/* when the current feeder is expected to block, by its usual run */
	u64	run_vtime;		/* the current task's vtime when it got the CPU */
	u64	run_sleeps;		/* how often it had slept by then */
	u64	ran_ns;			/* what it ran in its turn, as last settled; 0: not yet */
	u64	turn_ns;		/* the turn that it got then, or with which it went on ... */
	u64	cost;			/* ... and what a nanosecond of it costs in vtime: see cost_of() */
	u32	user;			/* enum cpu_user */
	u32	weight;			/* the current task's own */
	u16	group;			/* ... and its group */
	u8	is_idle_class;		/* the current task is SCHED_IDLE, or of a cpu.idle group */
	u32	resumes;		/* the current task gives way for a moment only, and then goes on */
	u32	taken;			/* a higher scheduling class has the CPU */
	u32	has_pinned;		/* its own queue holds tasks */
	u32	dispatches;		/* for what is done every so many of them */
	u64	used_file;		/* the last ioctl that was looked at: of which file, ... */
	u64	used_by;		/* ... by whom, ... */
	u64	used_in;		/* ... and in which jiffy */
	u32	ioctls;			/* how many were seen here; user space looks how fast it grows */
} __attribute__((aligned(CACHE_LINE)));

struct llc_ctx {
	u64	vtime_now;		/* the vtime clock of its queue */
	u64	vtime_most;		/* ... which goes no further until the next tick: see free_clocks() */
	u64	vtime_early;		/* of the task served last, if that is further; else 0 */
	u32	nr_waiting;		/* tasks in its queue, or about to be */
	u64	usual_run_ns;		/* how long what its CPUs are busy with usually runs before it sleeps */
} __attribute__((aligned(CACHE_LINE)));

struct domain_ctx {
	s64	budget_ns;		/* CPU time its feeders may use ahead of ordinary work */
	u64	refilled_at;
	u32	exhausted;
	u32	nr_waiting;		/* tasks in its feeder queue, or about to be */
} __attribute__((aligned(CACHE_LINE)));

struct gpu_ctx {
	u64	state;			/* feeders running << 32 | feeders waiting */
	u64	starving_since;		/* 0: not starving */
	struct stoker_gpu_stats stats;
} __attribute__((aligned(CACHE_LINE)));

struct cpu_ctx cpu_ctxs[STOKER_MAX_CPUS];
struct llc_ctx llc_ctxs[STOKER_MAX_LLCS];
struct domain_ctx domain_ctxs[STOKER_MAX_DOMAINS];
/* The sum of their nr_waiting: while it is 0, no CPU looks at any of them. */
u32 feeders_waiting;
struct gpu_ctx gpu_ctxs[STOKER_MAX_GPUS];

/* The home CPUs of each domain, for the kernel's own idle-CPU search. */
struct domain_mask {
	struct bpf_cpumask __kptr *home;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, STOKER_MAX_DOMAINS);
	__type(key, u32);
	__type(value, struct domain_mask);
} domain_masks SEC(".maps");

static __always_inline u32 lowest_bit(u64 bits)
{
	u32 n = 0;

	/* __builtin_ctzll has no BPF instruction before cpu v4 */
	if (!(bits & 0xffffffffULL)) { n += 32; bits >>= 32; }
	if (!(bits & 0xffff)) { n += 16; bits >>= 16; }
	if (!(bits & 0xff)) { n += 8; bits >>= 8; }
	if (!(bits & 0xf)) { n += 4; bits >>= 4; }
	if (!(bits & 0x3)) { n += 2; bits >>= 2; }
	return n + !(bits & 1);
}

/* IDs of queues: the first of each kind. */
enum queue_base {
	QUEUE_CPU	= 0,
	QUEUE_LLC	= 1 << 16,
	QUEUE_FEEDERS	= 2 << 16,
	QUEUE_LIMITS	= 3 << 16,
};

/*
 * Some kernels (Debian's 7.1 is one) were built with a BTF in which this kfunc
 * has another prototype, so that no program that needs it loads.
 */
void scx_bpf_kick_cpu___weak(s32 cpu, u64 flags) __ksym __weak;

/*
 * Makes @cpu look for work. Where that cannot be had, it looks when its current
 * task's turn ends, or when it next wakes.
 */
static __always_inline void kick(s32 cpu, u64 flags)
{
	if (bpf_ksym_exists(scx_bpf_kick_cpu___weak))
		scx_bpf_kick_cpu___weak(cpu, flags);
}

/*
 * scx_bpf_now(), for callbacks in which @cpu's run queue is locked and its clock
 * up to date, though the kernel does not vouch for that clock any more where it
 * let go of the lock on the way, and would read the hardware's at a price.
 */
static __always_inline u64 rq_now(s32 cpu)
{
	const struct rq *rq = bpf_per_cpu_ptr(&runqueues, cpu);

	return rq ? rq->clock : scx_bpf_now();
}

/* scx_bpf_task_cpu(), without the call: several callbacks of each switch ask. */
static __always_inline s32 cpu_of(const struct task_struct *p)
{
	return p->thread_info.cpu;
}

/* The bounds checks below cannot fail; they are what lets the verifier follow. */
static __always_inline struct cpu_ctx *cpu_ctx_of(s32 cpu)
{
	return &cpu_ctxs[(u32)cpu % STOKER_MAX_CPUS];
}

static __always_inline u32 llc_of(s32 cpu)
{
	return cpus[(u32)cpu % STOKER_MAX_CPUS].llc % STOKER_MAX_LLCS;
}

static __always_inline struct llc_ctx *llc_ctx_of(u32 llc)
{
	return &llc_ctxs[llc % STOKER_MAX_LLCS];
}

static __always_inline struct domain_ctx *domain_ctx_of(u32 domain)
{
	return &domain_ctxs[domain % STOKER_MAX_DOMAINS];
}

static __always_inline struct gpu_ctx *gpu_ctx_of(u32 gpu)
{
	return &gpu_ctxs[gpu % STOKER_MAX_GPUS];
}

/* True when @cpu is one of @domain's home CPUs; everything is home to a GPU of unknown home. */
static __always_inline bool is_home(s32 cpu, u32 domain)
{
	return domain == STOKER_NO_DOMAIN ||
	       cpus[(u32)cpu % STOKER_MAX_CPUS].domains & (1ULL << (domain % 64));
}

/* The home mask of @domain, or NULL where there is none. */
static __always_inline const struct cpumask *home_of(u32 domain)
{
	struct domain_mask *dm = bpf_map_lookup_elem(&domain_masks, &domain);

	return dm ? cast_mask(dm->home) : NULL;
}

/* True when @p may run on a home CPU of @domain: its home is known, and its user did not tie it elsewhere. */
static __always_inline bool reaches_home(const struct task_struct *p, u32 domain)
{
	const struct cpumask *home = home_of(domain);

	return home && bpf_cpumask_intersects(home, p->cpus_ptr);
}

/* Makes the home mask of @domain from what user space found. */
static int make_home(u32 domain)
{
	struct domain_mask *dm = bpf_map_lookup_elem(&domain_masks, &domain);
	struct bpf_cpumask *mask;
	u32 cpu;

	if (!dm)
		return -ENOENT;
	mask = bpf_cpumask_create();
	if (!mask)
		return -ENOMEM;
	bpf_for(cpu, 0, nr_cpus)
		if (is_home(cpu, domain))
			bpf_cpumask_set_cpu(cpu, mask);
	mask = bpf_kptr_xchg(&dm->home, mask);
	if (mask)
		bpf_cpumask_release(mask);
	return 0;
}
