/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What a feeder may claim over ordinary tasks: the grants.
 *
 * place:     its home CPUs first. Every feeder of a GPU of known home has it.
 * latency:   it runs at once while it has not used more than its fair share.
 * bandwidth: it runs at once even beyond that, out of its domain's budget. The
 *            budget fills at `feeder_cap_permille` of the home's CPUs, so that
 *            the rest is left to ordinary work whatever feeders do.
 */

const volatile u32 feeder_cap_permille = 800;

/* What a budget holds at most, in nanoseconds for each home CPU: short, so that the cap holds over short times. */
const volatile u64 budget_depth_ns = 50ULL * NSEC_PER_MSEC;

/* The budget of a GPU of unknown home: it has a domain of its own beyond the known ones. */
static __always_inline u32 budget_domain(u32 domain)
{
	return domain == STOKER_NO_DOMAIN ? STOKER_MAX_DOMAINS - 1 : domain;
}

static __always_inline u64 domain_cpus(u32 domain)
{
	return domain == STOKER_NO_DOMAIN ? nr_cpus : domain_nr_cpus[domain % STOKER_MAX_DOMAINS];
}

/*
 * Takes @run_ns of a feeder's CPU time out of @domain's budget, of what it got
 * by fair share too: so feeders get the cap or their fair share, whichever is
 * more, and not both. Debt is not kept: feeders that nobody competed with for a
 * while are not made to pay for it when somebody comes.
 */
static __always_inline void charge_budget(u32 domain, u64 run_ns)
{
	struct domain_ctx *d = domain_ctx_of(budget_domain(domain));

	if (d->budget_ns > 0)
		__sync_fetch_and_add(&d->budget_ns, -(s64)run_ns);
}

/*
 * True while feeders of @domain may exceed their fair share. A budget that ran
 * out must fill to a quarter first, so that ordinary tasks get whole slices.
 */
static bool has_bandwidth(u32 domain, u32 gpu, u64 now)
{
	struct domain_ctx *d = domain_ctx_of(budget_domain(domain));
	u64 refilled_at = d->refilled_at, elapsed = now - refilled_at;
	s64 depth = budget_depth_ns * domain_cpus(domain);

	if (time_after(now, refilled_at + NSEC_PER_MSEC) &&
	    __sync_val_compare_and_swap(&d->refilled_at, refilled_at, now) == refilled_at) {
		s64 fill, budget = d->budget_ns;

		if (elapsed > NSEC_PER_SEC)
			elapsed = NSEC_PER_SEC;
		fill = elapsed * domain_cpus(domain) * feeder_cap_permille / 1000;
		if (budget + fill > depth)
			fill = depth - budget;
		__sync_fetch_and_add(&d->budget_ns, fill);
	}

	if (d->budget_ns <= 0) {
		if (!d->exhausted) {
			d->exhausted = true;
			__sync_fetch_and_add(&gpu_ctx_of(gpu)->stats.cap_hits, 1);
		}
	} else if (d->exhausted && d->budget_ns >= depth / 4) {
		d->exhausted = false;
	}
	return !d->exhausted;
}

/* True when @p, a feeder, may run at once in an ordinary task's stead. */
static bool may_displace(struct task_struct *p, struct task_ctx *tctx, u64 now)
{
	return has_bandwidth(tctx->domain, tctx->gpu, now) ||
	       time_before(p->scx.dsq_vtime, llc_ctx_of(tctx->llc)->vtime_now);
}
