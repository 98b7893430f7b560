/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What a wake-up tells: that a thread waits for a GPU, when the GPU's interrupt
 * woke it, itself or through a kthread; and who supplies feeders, when one
 * thread wakes another often.
 */
#include <bpf_experimental.h>

/* Wake-ups a second that make a supplier, if they are a share of all its feeder's wake-ups that matters. */
#define SUPPLIER_RATE	(3 * RATE_ONE)
#define SUPPLIER_SHARE	20		/* one in so many */
/* How long a thread stays a supplier when it wakes no feeder any more. */
#define SUPPLIER_TTL_NS	(2ULL * NSEC_PER_SEC)

/*
 * The layout of the kernel's preempt count changed (the hard interrupt bits are
 * at 16 or at 24), and nothing tells which it is. So hard interrupts are known
 * by the registers they saved, and, where they hit the kernel on x86, by the
 * stack they run on, which covers what follows them too.
 */
extern const bool hardirq_stack_inuse __ksym __weak;
extern struct pt_regs *const __irq_regs __ksym __weak;

/* True when this runs in an interrupt: then the current task has nothing to do with what happens. */
static __always_inline bool in_interrupt(void)
{
	if (bpf_ksym_exists(&hardirq_stack_inuse) && *(bool *)bpf_this_cpu_ptr(&hardirq_stack_inuse))
		return true;
	if (bpf_ksym_exists(&__irq_regs) && *(u64 *)bpf_this_cpu_ptr(&__irq_regs))
		return true;
	return get_preempt_count() & SOFTIRQ_OFFSET;
}

/* @tctx supplies @gpu at @depth, from now on for a while. */
static void become_supplier(struct task_ctx *tctx, u32 gpu, u32 depth, u64 now)
{
	tctx->depth = depth;
	tctx->supplied_gpu = gpu;
	tctx->supplier_until = now + SUPPLIER_TTL_NS;
	know(tctx, tctx->supplier_until);
}

/*
 * @p was woken for the sake of @gpus: from their interrupt, or, if @is_relayed,
 * by a kthread that was. A kthread has other work, too, so its word counts only
 * for processes that use the GPU.
 */
static void note_gpu_wake(struct task_struct *p, struct task_ctx *tctx, u64 gpus, bool is_relayed, u64 now)
{
	if (p->flags & PF_KTHREAD) {
		relay(tctx, gpus, now);
		/* One that does so often is the GPU's own: as feeders wait for it, it goes where suppliers go. */
		if (rate_add(&tctx->uses, now) >= SUPPLIER_RATE)
			become_supplier(tctx, lowest_bit(gpus), 1, now);
		return;
	}
	/* Of an interrupt that GPUs share, the one that it uses. */
	if (gpus & tctx->gpus)
		gpus &= tctx->gpus;
	else if (is_relayed)
		gpus &= gpus_of_process(p);
	if (gpus)
		note_sign(tctx, lowest_bit(gpus), STOKER_EV_IRQ, now);
}

/* @waker woke a feeder or supplier, @tctx. */
static void note_supply(struct task_ctx *waker, struct task_ctx *tctx, bool of_feeder, u64 now)
{
	u32 depth = of_feeder ? 1 : tctx->depth + 1, rate;

	if (depth > STOKER_MAX_DEPTH || is_feeder(waker, now) || time_before(now, waker->barred_until))
		return;
	rate = rate_add(&waker->supplies, now);
	if (rate < SUPPLIER_RATE || rate * SUPPLIER_SHARE < tctx->wakes.count)
		return;
	if (is_supplier(waker, now) && waker->depth < depth)
		return;
	waker->evidence |= STOKER_EV_WAKE;
	become_supplier(waker, of_feeder ? tctx->gpu : tctx->supplied_gpu, depth, now);
}

/*
 * True when the waking of @p concerns a GPU, or may. Nothing can come of most
 * wake-ups, so it looks only at what is at hand.
 */
static __always_inline bool concerns_gpu(const struct task_struct *p)
{
	if (!gpus_in_use)
		return false;
	/* An idle task wakes nobody, but the interrupts that come while it runs do. */
	return is_marked(p) || cpu_ctx_of(bpf_get_smp_processor_id())->irq_gpus ||
	       (bpf_get_current_task_btf()->flags & (PF_KTHREAD | PF_IDLE)) == PF_KTHREAD;
}

/* Looks at who wakes @p. */
static void note_wake(struct task_struct *p, struct task_ctx *tctx, u64 now)
{
	struct task_struct *current = bpf_get_current_task_btf();
	u64 irq_gpus = cpu_ctx_of(bpf_get_smp_processor_id())->irq_gpus;
	bool feeds = is_feeder(tctx, now), supplies = is_supplier(tctx, now);
	struct task_ctx *waker;

	if (feeds || supplies)
		rate_add(&tctx->wakes, now);
	if (in_interrupt()) {
		if (irq_gpus)
			note_gpu_wake(p, tctx, irq_gpus, false, now);
		else if (may_ring(p, tctx, now))
			note_sign(tctx, tctx->gpu, 0, now);
		return;
	}
	waker = task_ctx_of(current);
	if (!waker)
		return;
	if (time_before(now, waker->relay_until))
		note_gpu_wake(p, tctx, waker->relay_gpus, true, now);
	else if ((feeds || supplies) && !(current->flags & PF_KTHREAD))
		note_supply(waker, tctx, feeds, now);
}

/* Writes what is known of each thread that is something to a GPU. */
SEC("iter/task")
int list_threads(struct bpf_iter__task *ctx)
{
	struct task_struct *p = ctx->task;
	struct stoker_thread thread = {};
	struct task_ctx *tctx;
	u64 now;

	if (!p)
		return 0;
	tctx = task_ctx_of(p);
	if (!tctx)
		return 0;
	now = scx_bpf_now();
	if (is_feeder(tctx, now)) {
		thread.role = STOKER_FEEDER;
		thread.gpu = tctx->gpu;
	} else if (is_supplier(tctx, now)) {
		thread.role = STOKER_SUPPLIER;
		thread.gpu = tctx->supplied_gpu;
		thread.depth = tctx->depth;
	} else if (tctx->gpus) {
		thread.gpu = tctx->gpu;
	} else {
		return 0;
	}
	thread.gpus = tctx->gpus;
	thread.evidence = tctx->evidence;
	thread.tid = p->pid;
	thread.tgid = p->tgid;
	bpf_probe_read_kernel_str(thread.comm, sizeof(thread.comm), p->comm);
	bpf_seq_write(ctx->meta->seq, &thread, sizeof(thread));
	return 0;
}
