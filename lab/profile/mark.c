/* SPDX-License-Identifier: GPL-2.0-only */
/* Tells plugin.c to write what it counted, by an instruction that does nothing and that no compiler makes. */
int main(void)
{
	__asm__ volatile(".byte 0x0f, 0x1f, 0x84, 0x00, 0xfe, 0x5a, 0xfe, 0x5a");
	return 0;
}
