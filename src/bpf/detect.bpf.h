/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Finds feeders. A thread is one while it shows signs of GPU work again and
 * again: ioctls on a GPU's device file, waking from the GPU's interrupt, or, if
 * it mapped the GPU and so may submit without system calls, waking from any
 * interrupt or computing without a pause (which is what a polling wait looks
 * like). One open or ioctl now and then, as monitors do, is no such sign.
 *
 * The hooks sit at the file layer and at interrupts, and know devices and
 * interrupts by number, so they serve every driver of every vendor. User space
 * adds what happened before the start, and says which mappings are still there.
 */

/* How long signs of GPU work, or a mapping of which user space says nothing more, speak for a thread. */
const volatile u64 evidence_ttl_ns = 10ULL * NSEC_PER_SEC;

/* Signs a second that make a feeder. */
#define FEEDER_RATE	(3 * RATE_ONE)
/* Signs nearer to each other than this are one: a monitor asks many things at a time. */
#define SIGN_SPACING_NS	(4ULL * NSEC_PER_MSEC)
/* How long a kthread that a GPU's interrupt woke is taken to work for that GPU. */
#define RELAY_NS	(2ULL * NSEC_PER_MSEC)

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, STOKER_MIN_DEVICES);
	__type(key, u32);
	__type(value, struct stoker_device);
} devices SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, STOKER_MAX_PROCESSES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, u32);
	__type(value, struct stoker_process);
} processes SEC(".maps");

/* The GPUs of an interrupt, as bits. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, STOKER_MIN_IRQS);
	__type(key, u32);
	__type(value, u64);
} irqs SEC(".maps");

/* Times a process did not fit: user space then looks for it in /proc. */
u64 processes_lost;

/*
 * Whether any thread may be a feeder. Raised with the first evidence, lowered
 * by expire_evidence() once all of it has expired. While it is 0, this is the whole
 * cost of the scheduler's purpose.
 */
u32 gpus_in_use;
/* No evidence holds longer than this. */
u64 gpus_used_until;

static __always_inline bool is_supplier(const struct task_ctx *tctx, u64 now)
{
	return time_before(now, tctx->supplier_until);
}

static __always_inline bool is_feeder(const struct task_ctx *tctx, u64 now)
{
	return time_before(now, tctx->feeder_until);
}

/* Some thread uses a GPU in some way: it is worth looking at threads until @until at least. */
static void note_gpu_use(u64 until)
{
	/* A quarter more than needed, so that this shared line is written now and then only. */
	if (time_before(gpus_used_until, until))
		gpus_used_until = until + evidence_ttl_ns / 4;
	if (!gpus_in_use)
		gpus_in_use = true;
}

/* Ties @tctx to @gpu: the one it feeds now. */
static void feed_gpu(struct task_ctx *tctx, u32 gpu, u64 now)
{
	u64 others = tctx->gpus & ~(1ULL << (gpu % 64));

	tctx->gpus |= 1ULL << (gpu % 64);
	tctx->gpu = gpu;
	if (others)
		weigh_home(tctx, gpu, now);
	else
		tctx->domain = gpu_domain[gpu % STOKER_MAX_GPUS];
}

/* Ties @tctx to one of @gpus: the one it feeds already, or else the first. */
static void feed_one_of(struct task_ctx *tctx, u64 gpus, u64 now)
{
	if (tctx->gpu != STOKER_NO_GPU && gpus & (1ULL << (tctx->gpu % 64)))
		return;
	feed_gpu(tctx, lowest_bit(gpus), now);
	tctx->gpus |= gpus;
}

/* Notes the process, so that user space can look after its threads. */
static void note_process(struct task_struct *p, u64 gpus, u64 now)
{
	struct stoker_process *known, fresh = {};
	u32 tgid = p->tgid;

	known = bpf_map_lookup_elem(&processes, &tgid);
	if (known && known->start_ns == p->group_leader->start_boottime) {
		if ((known->gpus & gpus) != gpus)
			__sync_fetch_and_or(&known->gpus, gpus);
		known->seen_ns = now;
		return;
	}
	fresh.start_ns = p->group_leader->start_boottime;
	fresh.gpus = gpus;
	fresh.seen_ns = now;
	if (bpf_map_update_elem(&processes, &tgid, &fresh, BPF_ANY))
		__sync_fetch_and_add(&processes_lost, 1);
}

/* The GPUs that @p's process is known to use. */
static u64 gpus_of_process(const struct task_struct *p)
{
	struct stoker_process *known;
	u32 tgid = p->tgid;

	known = bpf_map_lookup_elem(&processes, &tgid);
	return known && known->start_ns == p->group_leader->start_boottime ? known->gpus : 0;
}

/* @tctx is a feeder until @until. */
static void be_feeder(struct task_ctx *tctx, u64 until)
{
	tctx->feeder_until = until;
	know(tctx, until);
	note_gpu_use(until);
}

/* @tctx showed a sign of work for @gpu. */
static void note_sign(struct task_ctx *tctx, u32 gpu, u32 evidence, u64 now)
{
	if (tctx->gpu != gpu || tctx->gpus & (tctx->gpus - 1))
		feed_gpu(tctx, gpu, now);
	tctx->evidence |= evidence;
	if (time_before(now, tctx->barred_until))
		return;
	if (time_delta(now, tctx->signed_at) < SIGN_SPACING_NS)
		return;
	tctx->signed_at = now;
	if (rate_add(&tctx->uses, now) < FEEDER_RATE)
		return;
	/* Renewed a hundred times in its life at most: an ioctl is not to cost more. */
	if (time_before(tctx->feeder_until, now + evidence_ttl_ns / 100 * 99))
		be_feeder(tctx, now + evidence_ttl_ns);
}

/*
 * Whether the current thread uses @file by ioctl on this CPU, @cctx's, for the first
 * time in a jiffy. Once more would say nothing (see SIGN_SPACING_NS), and cost much of what
 * a short ioctl does: so this is asked before anything is looked up.
 */
static __always_inline bool is_first_ioctl(struct cpu_ctx *cctx, struct file *file)
{
	u64 current = bpf_get_current_task(), jiffy = bpf_jiffies64();

	if (cctx->used_file == (u64)file && cctx->used_by == current && cctx->used_in == jiffy)
		return false;
	cctx->used_file = (u64)file;
	cctx->used_by = current;
	cctx->used_in = jiffy;
	return true;
}

/* The current thread used @file in the way @evidence says. */
static __always_inline void note_use(struct file *file, u32 evidence)
{
	struct stoker_device *device;
	struct task_struct *p;
	struct task_ctx *tctx;
	u64 now, gpus;
	u32 dev;

	if ((file->f_inode->i_mode & S_IFMT) != S_IFCHR)
		return;
	dev = file->f_inode->i_rdev;
	device = bpf_map_lookup_elem(&devices, &dev);
	if (!device)
		return;

	p = bpf_get_current_task_btf();
	tctx = need_current_ctx();
	if (!tctx)
		return;
	now = scx_bpf_now();
	gpus = device->gpus;
	/* A control node of several GPUs says that a GPU is used, not which. */
	if (!(gpus & (gpus - 1))) {
		u32 gpu = lowest_bit(gpus);

		if (!(tctx->gpus & gpus))
			feed_gpu(tctx, gpu, now);
		if (evidence == STOKER_EV_MMAP || evidence == STOKER_EV_POLL)
			tctx->doorbell_until = now + evidence_ttl_ns;
		else if (evidence == STOKER_EV_IOCTL)
			note_sign(tctx, gpu, evidence, now);
	}
	if ((tctx->evidence & evidence) != evidence || evidence != STOKER_EV_IOCTL) {
		tctx->evidence |= evidence;
		know(tctx, now + evidence_ttl_ns);
		note_process(p, gpus, now);
		note_gpu_use(now + evidence_ttl_ns);
	}
}

/* KVM_RUN of <linux/kvm.h>: _IO(KVMIO, 0x80). On files of other drivers it is no ioctl that anybody knows. */
#define KVM_RUN 0xae80

/* The current thread runs a virtual CPU. User space knows whether its guest has a GPU. */
static __always_inline void note_vcpu(void)
{
	struct task_ctx *tctx = need_current_ctx();

	if (tctx && !(tctx->evidence & STOKER_EV_VCPU))
		tctx->evidence |= STOKER_EV_VCPU;
}

/*
 * True when @p may submit to a GPU by writing to a mapping of it, or waits for
 * one by polling its file, so that nothing is seen of its work but how it waits:
 * as a virtual CPU of a guest that has the GPU does, too. Of a process of which only that
 * it uses a GPU is known, the main thread may: others may be its workers, and
 * are told from feeders by the GPU's interrupt alone.
 */
static __always_inline bool may_ring(const struct task_struct *p, const struct task_ctx *tctx, u64 now)
{
	return time_before(now, tctx->doorbell_until) &&
	       (tctx->evidence & (STOKER_EV_MMAP | STOKER_EV_POLL | STOKER_EV_VCPU) || p->pid == p->tgid);
}

/* @p used up its turn and goes on, as a thread does that polls for its GPU. */
static __always_inline void note_full_turn(struct task_struct *p, struct task_ctx *tctx, u64 now)
{
	if (may_ring(p, tctx, now))
		note_sign(tctx, tctx->gpu, 0, now);
}

/* @tctx, a kthread, was woken for the sake of @gpus: whom it wakes within a while waits for one of them. */
static void relay(struct task_ctx *tctx, u64 gpus, u64 now)
{
	tctx->relay_gpus = gpus;
	tctx->relay_until = now + RELAY_NS;
}

SEC("tp_btf/irq_handler_entry")
int BPF_PROG(stoker_irq_entry, int irq)
{
	u32 key = irq;
	u64 *gpus;

	if (!gpus_in_use)
		return 0;
	gpus = bpf_map_lookup_elem(&irqs, &key);
	if (gpus)
		cpu_ctx_of(bpf_get_smp_processor_id())->irq_gpus = *gpus;
	return 0;
}

SEC("tp_btf/irq_handler_exit")
int BPF_PROG(stoker_irq_exit, int irq, struct irqaction *action, int ret)
{
	struct cpu_ctx *cctx = cpu_ctx_of(bpf_get_smp_processor_id());

	if (!cctx->irq_gpus)
		return 0;
	/* Its thread is a real-time one, of which the scheduler sees nothing but whom it wakes. */
	if (ret & IRQ_WAKE_THREAD && action->thread) {
		struct task_ctx *tctx = task_ctx_of(action->thread) ?: make_task_ctx(action->thread, 0);

		if (tctx)
			relay(tctx, cctx->irq_gpus, scx_bpf_now());
	}
	cctx->irq_gpus = 0;
	return 0;
}

SEC("fentry/security_file_open")
int BPF_PROG(stoker_file_open, struct file *file)
{
	note_use(file, STOKER_EV_OPEN);
	return 0;
}

/* User space turns it off for moments while there are very many: see pace_hooks(). */
SEC("fentry/security_file_ioctl")
int BPF_PROG(stoker_file_ioctl, struct file *file, unsigned int cmd)
{
	struct cpu_ctx *cctx = cpu_ctx_of(bpf_get_smp_processor_id());

	cctx->ioctls++;
	if (cmd == KVM_RUN)
		note_vcpu();
	else if (is_first_ioctl(cctx, file))
		note_use(file, STOKER_EV_IOCTL);
	return 0;
}

SEC("fentry/security_mmap_file")
int BPF_PROG(stoker_mmap_file, struct file *file)
{
	if (file)
		note_use(file, STOKER_EV_MMAP);
	return 0;
}

/* A thread asks @file to wake it: from poll(2), select(2) and the like, when it is about to sleep. */
SEC("fentry/__pollwait")
int BPF_PROG(stoker_pollwait, struct file *file)
{
	if (gpus_in_use)
		note_use(file, STOKER_EV_POLL);
	return 0;
}

/* User space asks, now and then, whether evidence is still good. Feeders that wait are looked for as long as it is. */
SEC("syscall")
int expire_evidence(void *ctx)
{
	/* With time for a thread that was a feeder a moment ago to get where it was going. */
	if (!time_after(scx_bpf_now(), gpus_used_until + NSEC_PER_SEC))
		return 0;
	if (!feeders_waiting)
		gpus_in_use = false;
	return 0;
}

/*
 * User space reports what it found of a thread, and learns what the thread was
 * seen to do. A thread with evidence of its own keeps its own GPU among those
 * reported; one without gets the first of them. What is reported makes no
 * feeder, unless it is a person's word: it says that the thread may submit
 * without system calls.
 */
SEC("syscall")
int report_thread(struct stoker_thread_report *report)
{
	struct task_struct *p = bpf_task_from_pid(report->tid);
	struct task_ctx *tctx;
	u64 now, until;

	report->ret = -ESRCH;
	if (!p)
		return 0;
	tctx = task_ctx_of(p);
	if (!tctx)
		goto out;
	now = scx_bpf_now();
	until = now + evidence_ttl_ns;
	report->ret = 0;
	report->known_gpus = tctx->gpus;
	report->known_evidence = tctx->evidence;
	if (report->word == STOKER_WORD_ORDINARY) {
		tctx->barred_until = until;
		tctx->feeder_until = 0;
		tctx->supplier_until = 0;
	} else if (report->evidence && report->gpus) {
		feed_one_of(tctx, report->gpus, now);
		tctx->evidence |= report->evidence;
		if (report->word == STOKER_WORD_FEEDER) {
			be_feeder(tctx, until);
		} else {
			tctx->doorbell_until = until;
			know(tctx, until);
			note_gpu_use(until);
		}
	}
out:
	bpf_task_release(p);
	return 0;
}
