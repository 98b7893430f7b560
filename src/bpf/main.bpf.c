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
#define CLOCK_MONOTONIC	1
#define SCHED_BATCH	3
#define SCHED_IDLE	5
#define TASK_DEAD	0x80
#define S_IFMT		0170000
#define S_IFCHR		0020000

#include "machine.bpf.h"
#include "task.bpf.h"
#include "rate.bpf.h"
#include "group.bpf.h"
#include "usual.bpf.h"
#include "weight.bpf.h"
#include "limit.bpf.h"
#include "tick.bpf.h"
#include "fit.bpf.h"
#include "detect.bpf.h"
#include "launch.bpf.h"
#include "wake.bpf.h"
#include "class.bpf.h"
#include "account.bpf.h"
#include "order.bpf.h"
#include "queue.bpf.h"
#include "place.bpf.h"
#include "preempt.bpf.h"

s32 BPF_STRUCT_OPS(stoker_select_cpu, struct task_struct *p, s32 prev_cpu, u64 wake_flags)
{
	bool is_idle = false;
	u64 vtime;
	s32 cpu;

	if (is_marked(p) || concerns_gpu(p)) {
		struct task_ctx *tctx = need_task_ctx(p);
		u64 now = scx_bpf_now();

		if (tctx) {
			if (gpus_in_use)
				note_wake(p, tctx, now);
			/* It waits for its group's budget: see enqueue. */
			if (is_throttled(tctx->group, is_feeder(tctx, now)))
				return prev_cpu;
			if (is_feeder(tctx, now))
				return place_feeder(p, tctx, prev_cpu, wake_flags, now);
			if (is_supplier(tctx, now))
				return place_supplier(p, tctx, prev_cpu, wake_flags, now);
		}
	}
	cpu = scx_bpf_select_cpu_dfl(p, prev_cpu, wake_flags, &is_idle);
	vtime = wake_vtime(p, llc_of(cpu));
	if (!is_idle) {
		s32 victim = pick_preempted(p, cpu, vtime);

		if (victim < 0)
			return cpu;
		cpu = victim;
		let_resume(cpu_ctx_of(cpu), p);
	}
	if (p->scx.dsq_vtime != vtime)
		set_vtime(p, vtime);
	scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, whole_turn(p), is_idle ? 0 : SCX_ENQ_PREEMPT);
	return cpu;
}

void BPF_STRUCT_OPS(stoker_enqueue, struct task_struct *p, u64 enq_flags)
{
	struct task_ctx *tctx;

	if (yields_here(p, enq_flags)) {
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, whole_turn(p), enq_flags);
		return;
	}
	tctx = need_task_ctx(p);
	if (!tctx) {
		scx_bpf_dsq_insert(p, SCX_DSQ_GLOBAL, slice_ns, enq_flags);
		return;
	}
	if (concerns_gpu(p)) {
		u64 now = scx_bpf_now();

		left_feeder_queue(tctx);
		if (!(enq_flags & SCX_ENQ_WAKEUP))
			note_full_turn(p, tctx, now);
		else if (p->nr_cpus_allowed == 1)
			note_wake(p, tctx, now);
		if (is_feeder(tctx, now)) {
			if (group_of(tctx->group)->limit && throttle(p, tctx, true, enq_flags))
				return;
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
	if (is_throttled(tctx->group, true))
		return false;
	note_full_turn(prev, tctx, now);
	if (!has_bandwidth(tctx->domain, tctx->gpu, now))
		return false;
	tctx->granted = true;
	begin_turn(prev, cctx, feeder_slice_ns);
	return true;
}

/* Nobody else wants the CPU: @prev, if it is still runnable, goes on, unless its group's limit forbids. */
static void goes_on(s32 cpu, struct cpu_ctx *cctx, struct task_struct *prev)
{
	struct llc_ctx *lctx = llc_ctx_of(llc_of(cpu));

	if (!prev || !(prev->scx.flags & SCX_TASK_QUEUED) || is_throttled(cctx->group, cctx->user == CPU_FEEDER))
		return;
	if (time_before(lctx->vtime_now, prev->scx.dsq_vtime))
		advance_clock(prev, lctx, false);
	begin_turn(prev, cctx, whole_turn(prev));
}

void BPF_STRUCT_OPS(stoker_dispatch, s32 cpu, struct task_struct *prev)
{
	struct cpu_ctx *cctx = cpu_ctx_of(cpu);
	u64 now;

	if (!gpus_in_use) {
		if (!dispatch_ordinary(cpu, cctx, prev))
			goes_on(cpu, cctx, prev);
		return;
	}
	now = rq_now(cpu);
	if (owes_turn(cpu, cctx, now)) {
		if (dispatch_ordinary(cpu, cctx, prev))
			return;
	}
	if (dispatch_feeder(cpus[(u32)cpu % STOKER_MAX_CPUS].domains))
		return;
	if (prev && keeps_cpu(cpu, cctx, prev, now))
		return;
	/* A CPU away from home with nothing else to do is better than none. */
	if (!dispatch_ordinary(cpu, cctx, prev) && !dispatch_feeder(~0ULL))
		goes_on(cpu, cctx, prev);
}

/* @p, of which something is known, got @cpu. Returns what it is to the CPU. */
static enum cpu_user run_known(struct task_struct *p, struct task_ctx *tctx, s32 cpu, struct cpu_ctx *cctx, u64 now)
{
	if (left_feeder_queue(tctx) && !is_home(cpu, tctx->domain))
		count_spill(tctx, STOKER_SPILL_HOME_FULL);
	if (is_feeder(tctx, now)) {
		account_running(tctx, now);
		cctx->feeder_done_at = now + tctx->avg_run_ns - tctx->run_ns;
	} else if (tctx->counted_gpu != STOKER_NO_GPU) {
		account_expired(tctx, now);
	}
	if (!time_before(now, tctx->known_until))
		tctx->known_until = 0;
	if (is_feeder(tctx, now))
		return CPU_FEEDER;
	return is_supplier(tctx, now) ? CPU_SUPPLIER : CPU_ORDINARY;
}

void BPF_STRUCT_OPS(stoker_running, struct task_struct *p)
{
	s32 cpu = cpu_of(p);
	struct cpu_ctx *cctx = cpu_ctx_of(cpu);
	u32 llc = llc_of(cpu), user = CPU_ORDINARY, group;
	struct llc_ctx *lctx = llc_ctx_of(llc);
	u64 now = rq_now(cpu), clock = lctx->vtime_now;
	struct task_ctx *tctx = task_ctx_of(p);
	bool waited = false;

	group = tctx ? tctx->group : group_of_task(p);
	if (!tctx && p->nvcsw + p->nivcsw)
		tctx = make_task_ctx(p, group);
	if (tctx) {
		waited = tctx->queued_weight && tctx->queued_llc == llc;
		if (waited && tctx->is_shared)
			note_served(lctx, p->scx.dsq_vtime);
		left_queue(tctx);
		left_limit(tctx);
		if (tctx->llc != llc) {
			tctx->llc = llc;
			set_vtime(p, clamp_vtime(p->scx.dsq_vtime, clock, LAG_BOUND_NS));
		}
		if (tctx->known_until)
			user = run_known(p, tctx, cpu, cctx, now);
	}
	sync_mark(p, (tctx && tctx->known_until) || group_of(group)->limit);
	cctx->run_sum_ns = p->se.sum_exec_runtime;
	cctx->run_at = now;
	cctx->run_sleeps = p->nvcsw;
	cctx->user = user;
	cctx->weight = p->scx.weight;
	cctx->group = group;
	cctx->is_idle_class = p->policy == SCHED_IDLE || group_of(group)->is_idle;
	if (user != CPU_FEEDER)
		cctx->feeders_since = 0;
	else if (!cctx->feeders_since)
		cctx->feeders_since = now;
	cctx->claimed_until = 0;
	cctx->resumes = false;
	if (!group_of(group)->is_active)
		activate(group);
	begin_turn(p, cctx, p->scx.slice);
	cctx->ran_ns = 0;
	if (time_before(clock, p->scx.dsq_vtime))
		advance_clock(p, lctx, waited);
	/* The clock goes by the order in which tasks are served, what a task has used does not. */
	if (tctx)
		restore_vtime(p, tctx);
	cctx->run_vtime = p->scx.dsq_vtime;
}

void BPF_STRUCT_OPS(stoker_stopping, struct task_struct *p, bool runnable)
{
	s32 cpu = cpu_of(p);
	struct cpu_ctx *cctx = cpu_ctx_of(cpu);
	struct task_ctx *feeder = cctx->user == CPU_FEEDER ? task_ctx_of(p) : NULL;

	settle(p, feeder, cpu, cctx);
	if (feeder)
		account_stopping(feeder, runnable, scx_bpf_now());
	if (p->__state & TASK_DEAD)
		leave_unpaid(p, cctx, llc_of(cpu));
	cctx->user = CPU_OTHER;
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
	u32 i;

	if (args->fork && KNOWS_CGROUPS)
		return 0;
	/* An error would end the scheduler as it starts, and later fail a fork. It is tried again when it is needed. */
	bpf_for(i, 0, STORAGE_TRIES)
		if (make_task_ctx(p, bpf_core_field_exists(args->cgroup) ? number_of(args->cgroup) : 0))
			break;
	return 0;
}

void BPF_STRUCT_OPS(stoker_enable, struct task_struct *p)
{
	struct task_ctx *tctx = task_ctx_of(p);
	u32 llc = llc_of(cpu_of(p)), group = group_of_task(p);

	if (tctx) {
		/* While it was of another class, nobody may have asked. */
		if (KNOWS_CGROUPS)
			tctx->group = group;
		group = tctx->group;
		tctx->llc = llc;
		tctx->owes_ns = 0;
	}
	set_vtime(p, first_vtime(p, group, llc));
}

/* Also how a thread leaves that dies while it waits, or changes to another scheduling class. */
void BPF_STRUCT_OPS(stoker_disable, struct task_struct *p)
{
	struct task_ctx *tctx = task_ctx_of(p);

	if (!tctx)
		return;
	left_queue(tctx);
	left_limit(tctx);
	left_feeder_queue(tctx);
	uncount(tctx, scx_bpf_now());
}

s32 BPF_STRUCT_OPS_SLEEPABLE(stoker_cgroup_init, struct cgroup *cgrp, struct scx_cgroup_init_args *args)
{
	struct group_number *known = NULL;
	u32 number, i;
	int err;

	bpf_for(i, 0, STORAGE_TRIES) {
		known = bpf_cgrp_storage_get(&group_numbers, cgrp, NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
		if (known)
			break;
	}
	if (!known)
		return -ENOMEM;
	known->number = cgrp->level > 0 ? make_group(cgrp, args->weight) : 0;
	number = own_number_of(cgrp);
	if (!number)
		return 0;
	err = scx_bpf_create_dsq(limit_queue(number), -1);
	if (err) {
		group_of(number)->is_used = false;
		return err;
	}
	if (bpf_core_field_exists(args->bw_quota_us))
		set_limit_us(number, args->bw_period_us, args->bw_quota_us, args->bw_burst_us);
	return 0;
}

void BPF_STRUCT_OPS(stoker_cgroup_exit, struct cgroup *cgrp)
{
	u32 number = own_number_of(cgrp);

	if (!number)
		return;
	set_limit(number, 0, 0, 0);
	scx_bpf_destroy_dsq(limit_queue(number));
	/* Its number may soon be that of a group at another level. */
	deactivate(number);
	group_of(number)->is_used = false;
}

void BPF_STRUCT_OPS(stoker_cgroup_move, struct task_struct *p, struct cgroup *from, struct cgroup *to)
{
	struct task_ctx *tctx = task_ctx_of(p);

	if (!tctx)
		return;
	left_queue(tctx);
	left_limit(tctx);
	tctx->group = number_of(to);
}

void BPF_STRUCT_OPS(stoker_cgroup_set_weight, struct cgroup *cgrp, u32 weight)
{
	u32 number = own_number_of(cgrp);

	if (number)
		set_group_weight(group_of(number), weight, group_of(number)->is_idle);
}

void BPF_STRUCT_OPS(stoker_cgroup_set_idle, struct cgroup *cgrp, bool idle)
{
	u32 number = own_number_of(cgrp);

	if (number)
		set_group_weight(group_of(number), 0, idle);
}

void BPF_STRUCT_OPS(stoker_cgroup_set_bandwidth, struct cgroup *cgrp, u64 period_us, u64 quota_us, u64 burst_us)
{
	u32 number = own_number_of(cgrp);

	if (number)
		set_limit_us(number, period_us, quota_us, burst_us);
}

s32 BPF_STRUCT_OPS_SLEEPABLE(stoker_init)
{
	u32 domain;
	int err;

	set_first_costs(group_of(0));
	err = make_queues();
	if (err)
		return err;
	err = start_ticking();
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
	       .cpu_release		= (void *)stoker_cpu_release,
	       .cpu_acquire		= (void *)stoker_cpu_acquire,
	       .init_task		= (void *)stoker_init_task,
	       .enable			= (void *)stoker_enable,
	       .disable			= (void *)stoker_disable,
	       .cgroup_init		= (void *)stoker_cgroup_init,
	       .cgroup_exit		= (void *)stoker_cgroup_exit,
	       .cgroup_move		= (void *)stoker_cgroup_move,
	       .cgroup_set_weight	= (void *)stoker_cgroup_set_weight,
	       .cgroup_set_idle		= (void *)stoker_cgroup_set_idle,
	       .cgroup_set_bandwidth	= (void *)stoker_cgroup_set_bandwidth,
	       .init			= (void *)stoker_init,
	       .exit			= (void *)stoker_exit,
	       .flags			= SCX_OPS_ENQ_LAST,
	       .timeout_ms		= 30000,
	       .name			= "stoker");
