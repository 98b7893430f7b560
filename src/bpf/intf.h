/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Every type and constant that the BPF scheduler and the Rust program share.
 *
 * Times are in nanoseconds. A GPU is named by its index in `Machine::gpus`, a
 * domain by its index in the list of distinct homes, an LLC by its index in
 * `Machine::llcs`.
 */
#ifndef STOKER_INTF_H
#define STOKER_INTF_H

#ifndef __VMLINUX_H__
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int s32;
typedef long long s64;
#endif

enum stoker_limits {
	STOKER_MAX_CPUS		= 1024,
	STOKER_MAX_LLCS		= 128,
	STOKER_MAX_GPUS		= 64,	/* a thread's GPUs fit in one u64 */
	STOKER_MAX_DOMAINS	= 64,	/* likewise the domains of a CPU */
	STOKER_MAX_GROUPS	= 8192,	/* cgroups with the cpu controller; more count as their parents */
	STOKER_MAX_LEVELS	= 16,	/* of the cgroup tree, the root's included; groups below count as their parents */
	/* What maps hold: user space makes them larger, or for fewer processes, as the machine needs. */
	STOKER_MIN_DEVICES	= 1024,
	STOKER_MIN_IRQS		= 4096,
	STOKER_MAX_PROCESSES	= 65536,
	STOKER_MAX_DEPTH	= 3,	/* suppliers of suppliers, and so on: the farthest that count */
	STOKER_DELAY_BUCKETS	= 40,	/* of log2 nanoseconds: up to 18 minutes */
};

enum stoker_none {
	STOKER_NO_DOMAIN	= 0xff,	/* the GPU's home is unknown */
	STOKER_NO_GPU		= 0xff,
};

/* How a thread was seen to use a GPU: bits of stoker_thread_report.evidence. */
enum stoker_evidence {
	STOKER_EV_OPEN		= 1 << 0,
	STOKER_EV_MMAP		= 1 << 1,
	STOKER_EV_IOCTL		= 1 << 2,
	STOKER_EV_PROCESS	= 1 << 3, /* its process uses the GPU; nothing is known of the thread */
	STOKER_EV_IRQ		= 1 << 4, /* woken from the GPU's interrupt */
	STOKER_EV_WAKE		= 1 << 5, /* wakes feeders, or suppliers, often */
	STOKER_EV_WORD		= 1 << 6, /* its cgroup's owner says so, or the configuration file */
	STOKER_EV_POLL		= 1 << 7, /* polls the GPU's file */
	STOKER_EV_VCPU		= 1 << 8, /* it runs a virtual CPU: no use of a GPU, unless the guest has one */
	STOKER_EV_LAUNCH	= 1 << 9, /* called its GPU's library to launch work */
};

/* What a person says of a thread: the owner of its cgroup, or the configuration file. */
enum stoker_word {
	STOKER_WORD_NONE,
	STOKER_WORD_FEEDER,	/* it is a feeder */
	STOKER_WORD_ORDINARY,	/* it is none, whatever it does, and no supplier */
};

/* What a thread is to a GPU. */
enum stoker_role {
	STOKER_ORDINARY,
	STOKER_FEEDER,
	STOKER_SUPPLIER,
};

/* One thread that is something to a GPU, or was seen to use one: what the iterator `list_threads` gives. */
struct stoker_thread {
	u64	gpus;		/* GPUs seen to be used */
	u32	tid;
	u32	tgid;
	u32	evidence;	/* STOKER_EV_* */
	u8	role;		/* enum stoker_role, now */
	u8	gpu;		/* the one fed, or supplied for */
	u8	depth;		/* of a supplier: 1 wakes a feeder itself */
	u8	pad;
	char	comm[16];
};

/* Why a feeder left its home. */
enum stoker_spill {
	STOKER_SPILL_HOME_FULL,		/* no home CPU would give way: feeders, or higher scheduling classes, ran on them */
	STOKER_SPILL_AFFINITY,		/* its affinity mask has no home CPU: counted at each wake-up */
	STOKER_SPILL_NO_GRANT,		/* it may not displace, and no home CPU was idle */
	STOKER_NR_SPILLS,
};

/* One CPU, as discovered. */
struct stoker_cpu {
	u64	domains;	/* bit d: this CPU is home to domain d */
	u64	llc;
};

/* A char device that belongs to a GPU: value of the map `devices`, whose key is the kernel's dev_t. */
struct stoker_device {
	u64	gpus;		/* bit g: the device belongs to GPU g; several for a control node */
};

/*
 * What one GPU's feeders got: counters, only ever added to, of all CPUs
 * together. Where home is unknown, or out of a feeder's reach, "home" is any CPU
 * that it may use.
 */
struct stoker_gpu_stats {
	u64	wakeups;
	u64	idle_home;		/* wake-ups served by an idle home CPU */
	u64	displacements;		/* times one displaced ordinary work at home: at a wake-up, or to stay there */
	u64	displacements_away;	/* ... away from home */
	u64	supplies;		/* times a supplier displaced ordinary work */
	u64	waits;			/* wake-ups that waited for another feeder at home */
	u64	spills[STOKER_NR_SPILLS];
	u64	home_ns;		/* time feeders ran at home */
	u64	away_ns;		/* ... elsewhere */
	u64	delay_ns;		/* time feeders were runnable and did not run, summed over feeders */
	u64	starvation_ns;		/* time in which feeders were runnable and none of them ran */
	u64	delays[STOKER_DELAY_BUCKETS]; /* histogram of one wait: bucket b counts [2^b, 2^(b+1)) ns */
	u64	feeders;		/* feeders that ran, each once in an epoch */
	u64	cap_hits;		/* times the domain's bandwidth grant ran out */
};

/* cpu.max of all groups together: counters, only ever added to. */
struct stoker_limit_stats {
	u64	periods;		/* of limited groups */
	u64	throttled_periods;	/* those in which a task had to wait for the next */
};

/* Argument of the program `set_group`: what the kernel does not tell by callback. */
struct stoker_group_report {
	u64	cgroup;			/* its ID: its directory's inode number */
	u64	quota_ns;		/* cpu.max; 0: none */
	u64	period_ns;
	u64	burst_ns;
	u32	is_idle;		/* cpu.idle */
	s32	ret;			/* 0, or -ENOENT: no such group here */
};

/* A process that touched a GPU: value of the map `processes`, whose key is the tgid. */
struct stoker_process {
	u64	start_ns;	/* its leader's start_boottime: tells a recycled PID */
	u64	gpus;
	u64	seen_ns;
};

/* Argument of the program `report_thread`: what user space knows of one thread. */
struct stoker_thread_report {
	s32	tid;
	u32	evidence;	/* STOKER_EV_*; 0 only asks */
	u32	word;		/* enum stoker_word */
	u32	pad;
	u64	gpus;		/* the GPUs it feeds */
	/* Out: */
	u64	known_gpus;	/* GPUs the thread itself was seen to use */
	u32	known_evidence;	/* STOKER_EV_* seen of the thread itself */
	s32	ret;		/* 0 or -ESRCH */
};

/* Argument of the program `judge_launches`: whether a thread launched work in a sample makes it a feeder. */
struct stoker_launches {
	s32	tid;
	u32	sample;		/* its number */
	u64	gpus;		/* the GPUs its process uses */
	/* Out: */
	u32	launched;	/* it did */
	u32	pad;
};

#endif /* STOKER_INTF_H */
