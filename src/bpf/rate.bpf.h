/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * How often things happen, in one number that forgets: see struct rate. At a
 * steady f events a second it comes to about f.
 */

#define RATE_HALF_LIFE_NS	(500ULL * NSEC_PER_MSEC)
#define RATE_ONE		16U

/* Lets @rate forget what time has made of it by @now. */
static __always_inline u32 rate_at(struct rate *rate, u64 now)
{
	u64 halves = time_delta(now, rate->at) / RATE_HALF_LIFE_NS;

	if (halves) {
		rate->count = halves < 32 ? rate->count >> halves : 0;
		rate->at += halves * RATE_HALF_LIFE_NS;
	}
	return rate->count;
}

/* Counts one event. Returns the rate. */
static __always_inline u32 rate_add(struct rate *rate, u64 now)
{
	if (rate_at(rate, now) < RATE_ONE * 100000)
		rate->count += RATE_ONE;
	return rate->count;
}
