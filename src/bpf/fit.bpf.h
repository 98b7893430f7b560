/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Which home a thread of several GPUs goes to: the one that fits most of what
 * it does. What it does now and then elsewhere does not move it.
 */

#define HOMES_HALF_LIFE_NS	NSEC_PER_SEC

/* @tctx, a thread of several GPUs, worked for @gpu. */
static void weigh_home(struct task_ctx *tctx, u32 gpu, u64 now)
{
	struct home_uses *homes = &tctx->homes;
	u64 halves = time_delta(now, homes->at) / HOMES_HALF_LIFE_NS;
	u32 domain = gpu_domain[gpu % STOKER_MAX_GPUS], own = 0, least = 0, i;
	s32 slot = -1;

	if (halves)
		homes->at = now;
	for (i = 0; i < THREAD_HOMES; i++) {
		if (halves)
			homes->counts[i] = halves < 16 ? homes->counts[i] >> halves : 0;
		if (homes->domains[i] == domain)
			slot = i;
		if (homes->domains[i] == tctx->domain)
			own = homes->counts[i];
		if (homes->counts[i] < homes->counts[least % THREAD_HOMES])
			least = i;
	}
	if (slot < 0) {
		slot = least;
		homes->domains[slot % THREAD_HOMES] = domain;
		homes->counts[slot % THREAD_HOMES] = 0;
	}
	if (homes->counts[slot % THREAD_HOMES] < 0xffff)
		homes->counts[slot % THREAD_HOMES]++;
	/* A quarter more, so that a thread of two like homes stays. */
	if (homes->counts[slot % THREAD_HOMES] > own + own / 4 + 1)
		tctx->domain = domain;
}
