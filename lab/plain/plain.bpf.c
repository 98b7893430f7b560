/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The least that a sched_ext scheduler can be: an idle CPU if the kernel finds
 * one, else one queue for all, first come, first served. What this costs is
 * the kernel's price for sched_ext; what another costs more is its own.
 */
#include <scx/common.bpf.h>

char _license[] SEC("license") = "GPL";

UEI_DEFINE(uei);

#define SHARED_DSQ	0

s32 BPF_STRUCT_OPS(plain_select_cpu, struct task_struct *p, s32 prev_cpu, u64 wake_flags)
{
	bool is_idle = false;
	s32 cpu = scx_bpf_select_cpu_dfl(p, prev_cpu, wake_flags, &is_idle);

	if (is_idle)
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, SCX_SLICE_DFL, 0);
	return cpu;
}

void BPF_STRUCT_OPS(plain_enqueue, struct task_struct *p, u64 enq_flags)
{
	scx_bpf_dsq_insert(p, SHARED_DSQ, SCX_SLICE_DFL, enq_flags);
}

void BPF_STRUCT_OPS(plain_dispatch, s32 cpu, struct task_struct *prev)
{
	scx_bpf_dsq_move_to_local(SHARED_DSQ, 0);
}

s32 BPF_STRUCT_OPS_SLEEPABLE(plain_init)
{
	return scx_bpf_create_dsq(SHARED_DSQ, -1);
}

void BPF_STRUCT_OPS(plain_exit, struct scx_exit_info *ei)
{
	UEI_RECORD(uei, ei);
}

SCX_OPS_DEFINE(plain_ops,
	       .select_cpu	= (void *)plain_select_cpu,
	       .enqueue		= (void *)plain_enqueue,
	       .dispatch	= (void *)plain_dispatch,
	       .init		= (void *)plain_init,
	       .exit		= (void *)plain_exit,
	       .name		= "plain");
