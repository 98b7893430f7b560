/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Finds feeders: threads that open, map or ioctl a GPU's device file. The hooks
 * sit at the file layer and know devices by number, so they serve every driver
 * of every vendor. User space adds what happened before the start, and renews
 * the evidence of threads that submit without system calls.
 */

/* How long an open, a mapping or an ioctl speaks for a thread. User space renews it for mappings that are still there. */
const volatile u64 evidence_ttl_ns = 10ULL * NSEC_PER_SEC;

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, STOKER_MAX_DEVICES);
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

/* Processes that did not fit: user space says so, once. */
u64 processes_lost;

/*
 * Whether any thread may be a feeder. Raised with the first evidence, lowered
 * by expire_evidence() once all of it has expired. While it is 0, this is the whole
 * cost of the scheduler's purpose.
 */
u32 gpus_in_use;
/* No evidence holds longer than this. */
u64 gpus_used_until;

static __always_inline bool is_feeder(const struct task_ctx *tctx, u64 now)
{
	return time_before(now, tctx->feeder_until);
}

/* Lengthens the time for which @tctx is a feeder; it never shortens it. */
static void renew_evidence(struct task_ctx *tctx, u64 now)
{
	u64 until = now + evidence_ttl_ns;

	tctx->feeder_until = until;
	/* A quarter more than needed, so that this shared line is written now and then only. */
	if (time_before(gpus_used_until, until))
		gpus_used_until = until + evidence_ttl_ns / 4;
	if (!gpus_in_use)
		gpus_in_use = true;
}

/* Ties @tctx to @gpu: the one it feeds now. */
static void feed_gpu(struct task_ctx *tctx, u32 gpu)
{
	tctx->gpu = gpu;
	tctx->domain = gpu_domain[gpu % STOKER_MAX_GPUS];
}

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
	tctx = task_ctx_of(p);
	if (!tctx)
		return;
	now = scx_bpf_now();
	gpus = device->gpus;
	/* A control node of several GPUs says that a GPU is used, not which. */
	if (!(gpus & (gpus - 1))) {
		u32 gpu = lowest_bit(gpus);

		if (tctx->gpu != gpu || !(tctx->gpus & gpus)) {
			tctx->gpus |= gpus;
			feed_gpu(tctx, gpu);
		}
		/* Renewed a hundred times in its life at most: an ioctl is not to cost more. */
		if (time_before(tctx->feeder_until, now + evidence_ttl_ns / 100 * 99))
			renew_evidence(tctx, now);
	}
	if ((tctx->evidence & evidence) != evidence || evidence != STOKER_EV_IOCTL) {
		tctx->evidence |= evidence;
		note_process(p, gpus, now);
	}
}

SEC("fentry/security_file_open")
int BPF_PROG(stoker_file_open, struct file *file)
{
	note_use(file, STOKER_EV_OPEN);
	return 0;
}

SEC("fentry/security_file_ioctl")
int BPF_PROG(stoker_file_ioctl, struct file *file)
{
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

/* User space asks, now and then, whether evidence is still good. Feeders that wait are looked for as long as it is. */
SEC("syscall")
int expire_evidence(void *ctx)
{
	u32 domain;

	/* With time for a thread that was a feeder a moment ago to get where it was going. */
	if (!time_after(scx_bpf_now(), gpus_used_until + NSEC_PER_SEC))
		return 0;
	bpf_for(domain, 0, nr_domains)
		if (domain_ctx_of(domain)->nr_waiting)
			return 0;
	gpus_in_use = false;
	return 0;
}

/*
 * User space reports what it found of a thread, and learns what the thread was
 * seen to do. A thread with evidence of its own keeps its own GPU among those
 * reported; one without gets the first of them.
 */
SEC("syscall")
int report_thread(struct stoker_thread_report *report)
{
	struct task_struct *p = bpf_task_from_pid(report->tid);
	struct task_ctx *tctx;

	report->ret = -ESRCH;
	if (!p)
		return 0;
	tctx = task_ctx_of(p);
	if (!tctx)
		goto out;
	report->ret = 0;
	report->known_gpus = tctx->gpus;
	report->known_evidence = tctx->evidence;
	if (report->evidence && report->gpus) {
		if (!(tctx->gpus & report->gpus)) {
			tctx->gpus |= report->gpus;
			feed_gpu(tctx, lowest_bit(report->gpus));
		}
		tctx->evidence |= report->evidence;
		renew_evidence(tctx, scx_bpf_now());
	}
out:
	bpf_task_release(p);
	return 0;
}
