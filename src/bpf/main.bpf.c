/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * scx_stoker: keeps GPUs fed.
 *
 * Each callback reads as the stages a task goes through: who is it, where does
 * it belong, what may it claim, where does it queue, what did it use. Each
 * stage is in the file of that name; all are one translation unit.
 */
#include <scx/common.bpf.h>
#include "intf.h"

char _license[] SEC("license") = "GPL";

UEI_DEFINE(uei);

#define NSEC_PER_SEC	1000000000ULL
#define NSEC_PER_MSEC	1000000ULL
#define NSEC_PER_USEC	1000ULL
#define S_IFMT		0170000
#define S_IFCHR		0020000

#include "machine.bpf.h"
#include "task.bpf.h"
#include "rate.bpf.h"
#include "weight.bpf.h"
#include "detect.bpf.h"
#include "wake.bpf.h"
#include "class.bpf.h"
#include "account.bpf.h"
#include "queue.bpf.h"
#include "place.bpf.h"

s32 BPF_STRUCT_OPS(stoker_select_cpu, struct task_struct *p, s32 prev_cpu, u64 wake_flags)
{
	bool is_idle = false;
	s32 cpu;

	if (gpus_in_use) {
		struct task_ctx *tctx = task_ctx_of(p);
		u64 now = scx_bpf_now();

		if (tctx) {
			note_wake(p, tctx, now);
			if (is_feeder(tctx, now))
				return place_feeder(p, tctx, prev_cpu, wake_flags, now);
			if (is_supplier(tctx, now))
				return place_supplier(p, tctx, prev_cpu, wake_flags, now);
		}
	}
	cpu = scx_bpf_select_cpu_dfl(p, prev_cpu, wake_flags, &is_idle);
	if (is_idle)
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, slice_ns, 0);
	return cpu;
}

void BPF_STRUCT_OPS(stoker_enqueue, struct task_struct *p, u64 enq_flags)
{
	struct task_ctx *tctx = task_ctx_of(p);

	if (!tctx) {
		scx_bpf_dsq_insert(p, SCX_DSQ_GLOBAL, slice_ns, enq_flags);
		return;
	}
	if (gpus_in_use) {
		u64 now = scx_bpf_now();

		left_feeder_queue(tctx);
		if (!(enq_flags & SCX_ENQ_WAKEUP))
			note_full_turn(p, tctx, now);
		else if (p->nr_cpus_allowed == 1)
			note_wake(p, tctx, now);
		if (is_feeder(tctx, now)) {
			enqueue_feeder(p, tctx, enq_flags, now);
			return;
		}
	}
	enqueue_ordinary(p, tctx, enq_flags);
}

/*
 * True when @prev, a feeder whose turn on @cpu ended with no other feeder
 * waiting, has another: at home, or where its user tied it, within its domain's
 * budget and unless the CPU owes others a turn.
 */
static bool keeps_cpu(s32 cpu, struct cpu_ctx *cctx, struct task_struct *prev, u64 now)
{
	struct task_ctx *tctx;

	if (cctx->user != CPU_FEEDER || !(prev->scx.flags & SCX_TASK_QUEUED) || owes_turn(cpu, cctx, now))
		return false;
	tctx = task_ctx_of(prev);
	if (!tctx || !is_feeder(tctx, now) || (!is_home(cpu, tctx->domain) && reaches_home(prev, tctx->domain)))
		return false;
	settle(prev, tctx, cpu, cctx);
	note_full_turn(prev, tctx, now);
	if (!has_bandwidth(tctx->domain, tctx->gpu, now))
		return false;
	tctx->granted = true;
	scx_bpf_task_set_slice(prev, feeder_slice_ns);
	return true;
}

void BPF_STRUCT_OPS(stoker_dispatch, s32 cpu, struct task_struct *prev)
{
	struct cpu_ctx *cctx = cpu_ctx_of(cpu);
	u64 now;

	if (!gpus_in_use) {
		dispatch_ordinary(cpu, cctx, prev);
		return;
	}
	now = scx_bpf_now();
	if (owes_turn(cpu, cctx, now)) {
		if (dispatch_ordinary(cpu, cctx, prev))
			return;
	}
	if (dispatch_feeder(cpus[(u32)cpu % STOKER_MAX_CPUS].domains))
		return;
	if (prev && keeps_cpu(cpu, cctx, prev, now))
		return;
	/* A CPU away from home with nothing else to do is better than none. */
	if (!dispatch_ordinary(cpu, cctx, prev))
		dispatch_feeder(~0ULL);
}

void BPF_STRUCT_OPS(stoker_running, struct task_struct *p)
{
	s32 cpu = scx_bpf_task_cpu(p);
	struct cpu_ctx *cctx = cpu_ctx_of(cpu);
	u32 llc = llc_of(cpu), user = CPU_ORDINARY;
	u64 now = scx_bpf_now(), *vtime_now = &llc_ctx_of(llc)->vtime_now;
	struct task_ctx *tctx;

	if (nr_llcs > 1 || gpus_in_use) {
		tctx = task_ctx_of(p);
		if (tctx) {
			if (tctx->llc != llc)
				scx_bpf_task_set_dsq_vtime(p, rebase_vtime(p, tctx, llc));
			if (left_feeder_queue(tctx) && !is_home(cpu, tctx->domain))
				count_spill(tctx, STOKER_SPILL_HOME_FULL);
			if (is_feeder(tctx, now)) {
				user = CPU_FEEDER;
				account_running(tctx, now);
				cctx->feeder_done_at = now + tctx->avg_run_ns - tctx->run_ns;
			} else {
				if (tctx->counted_gpu != STOKER_NO_GPU)
					account_expired(tctx, now);
				if (is_supplier(tctx, now))
					user = CPU_SUPPLIER;
			}
		}
	}
	cctx->run_sum_ns = p->se.sum_exec_runtime;
	cctx->run_at = now;
	cctx->user = user;
	cctx->yielded = false;
	if (user != CPU_FEEDER)
		cctx->feeders_since = 0;
	else if (!cctx->feeders_since)
		cctx->feeders_since = now;
	cctx->claimed_until = 0;
	if (time_before(*vtime_now, p->scx.dsq_vtime))
		*vtime_now = p->scx.dsq_vtime;
}

void BPF_STRUCT_OPS(stoker_stopping, struct task_struct *p, bool runnable)
{
	s32 cpu = scx_bpf_task_cpu(p);
	struct cpu_ctx *cctx = cpu_ctx_of(cpu);
	struct task_ctx *feeder = cctx->user == CPU_FEEDER ? task_ctx_of(p) : NULL;

	if (cctx->user == CPU_SUPPLIER)
		settle_supplier(p, cctx);
	settle(p, feeder, cpu, cctx);
	if (feeder)
		account_stopping(feeder, runnable, scx_bpf_now());
	cctx->user = CPU_OTHER;
}

bool BPF_STRUCT_OPS(stoker_yield, struct task_struct *from, struct task_struct *to)
{
	cpu_ctx_of(scx_bpf_task_cpu(from))->yielded = true;
	scx_bpf_task_set_slice(from, 0);
	return false;
}

/*
 * A higher scheduling class takes the CPU: what waits for this CPU alone is
 * queued again, where other CPUs find it.
 */
void BPF_STRUCT_OPS(stoker_cpu_release, s32 cpu, struct scx_cpu_release_args *args)
{
	cpu_ctx_of(cpu)->taken = true;
	scx_bpf_reenqueue_local();
}

void BPF_STRUCT_OPS(stoker_cpu_acquire, s32 cpu, struct scx_cpu_acquire_args *args)
{
	cpu_ctx_of(cpu)->taken = false;
}

s32 BPF_STRUCT_OPS(stoker_init_task, struct task_struct *p, struct scx_init_task_args *args)
{
	struct task_ctx *tctx;

	tctx = bpf_task_storage_get(&task_ctxs, p, NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!tctx)
		return -ENOMEM;
	tctx->gpu = STOKER_NO_GPU;
	tctx->domain = STOKER_NO_DOMAIN;
	tctx->counted_gpu = STOKER_NO_GPU;
	tctx->queued_domain = STOKER_NO_DOMAIN;
	return 0;
}

void BPF_STRUCT_OPS(stoker_enable, struct task_struct *p)
{
	struct task_ctx *tctx = task_ctx_of(p);
	u32 llc = llc_of(scx_bpf_task_cpu(p));

	if (tctx)
		tctx->llc = llc;
	scx_bpf_task_set_dsq_vtime(p, llc_ctx_of(llc)->vtime_now);
}

/* Also how a thread leaves that dies while it waits, or changes to another scheduling class. */
void BPF_STRUCT_OPS(stoker_disable, struct task_struct *p)
{
	struct task_ctx *tctx = task_ctx_of(p);

	if (!tctx)
		return;
	left_feeder_queue(tctx);
	uncount(tctx, scx_bpf_now());
}

s32 BPF_STRUCT_OPS(stoker_cgroup_init, struct cgroup *cgrp, struct scx_cgroup_init_args *args)
{
	return set_group_weight(cgrp, args->weight);
}

void BPF_STRUCT_OPS(stoker_cgroup_set_weight, struct cgroup *cgrp, u32 weight)
{
	set_group_weight(cgrp, weight);
}

s32 BPF_STRUCT_OPS_SLEEPABLE(stoker_init)
{
	u32 domain;
	int err;

	err = make_queues();
	if (err)
		return err;
	bpf_for(domain, 0, nr_domains) {
		err = make_home(domain);
		if (err)
			return err;
	}
	return 0;
}

void BPF_STRUCT_OPS(stoker_exit, struct scx_exit_info *ei)
{
	UEI_RECORD(uei, ei);
}

SCX_OPS_DEFINE(stoker_ops,
	       .select_cpu		= (void *)stoker_select_cpu,
	       .enqueue			= (void *)stoker_enqueue,
	       .dispatch		= (void *)stoker_dispatch,
	       .running			= (void *)stoker_running,
	       .stopping		= (void *)stoker_stopping,
	       .yield			= (void *)stoker_yield,
	       .cpu_release		= (void *)stoker_cpu_release,
	       .cpu_acquire		= (void *)stoker_cpu_acquire,
	       .init_task		= (void *)stoker_init_task,
	       .enable			= (void *)stoker_enable,
	       .disable			= (void *)stoker_disable,
	       .cgroup_init		= (void *)stoker_cgroup_init,
	       .cgroup_set_weight	= (void *)stoker_cgroup_set_weight,
	       .init			= (void *)stoker_init,
	       .exit			= (void *)stoker_exit,
	       .timeout_ms		= 30000,
	       .name			= "stoker");
