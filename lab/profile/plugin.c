/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * A QEMU plugin that counts how often the guest executes each block of code. When
 * the guest executes the instruction of mark.c, it writes what it counted since
 * the last time to the file out.N in the folder that its argument out=DIR names
 * (N: 0, 1, ...), a line a block: address in hex, instructions, executions.
 *
 * The prototypes are those of QEMU's plugin API, version 1, whose header Debian
 * does not ship.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct qemu_plugin_tb;
struct qemu_plugin_insn;
typedef uint64_t plugin_id;

extern void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id id, void (*cb)(plugin_id, struct qemu_plugin_tb *));
extern void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *tb, int op, void *ptr, uint64_t imm);
extern void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *tb, void (*cb)(unsigned int, void *), int flags,
						 void *data);
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
extern uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *tb);
extern struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t index);
extern const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *insn);
extern size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *insn);

#define EXPORTED __attribute__((visibility("default")))
#define INLINE_ADD_U64	0
#define NO_REGISTERS	0

EXPORTED int qemu_plugin_version = 1;

struct block {
	uint64_t	address;
	uint64_t	instructions;
	uint64_t	executions;
	struct block	*next;
};

#define BUCKETS 65536
static struct block *blocks[BUCKETS];
static const char *out = ".";
static int marks;

/* The instruction of mark.c: nopl 0x5afe5afe(%rax,%rax,1). */
static const unsigned char mark[] = { 0x0f, 0x1f, 0x84, 0x00, 0xfe, 0x5a, 0xfe, 0x5a };

static struct block *block_of(uint64_t address, uint64_t instructions)
{
	struct block **bucket = &blocks[(address ^ address >> 16) % BUCKETS], *block;

	for (block = *bucket; block; block = block->next)
		if (block->address == address && block->instructions == instructions)
			return block;
	block = calloc(1, sizeof(*block));
	if (!block)
		abort();
	block->address = address;
	block->instructions = instructions;
	block->next = *bucket;
	return *bucket = block;
}

static void on_mark(unsigned int cpu, void *data)
{
	char path[4096];
	FILE *file;
	int i;

	(void)cpu, (void)data;
	snprintf(path, sizeof(path), "%s/out.%d", out, marks++);
	file = fopen(path, "w");
	if (!file) {
		perror(path);
		return;
	}
	for (i = 0; i < BUCKETS; i++) {
		struct block *block;

		for (block = blocks[i]; block; block = block->next) {
			if (block->executions)
				fprintf(file, "%lx %lu %lu\n", block->address, block->instructions, block->executions);
			block->executions = 0;
		}
	}
	fclose(file);
}

static void on_translation(plugin_id id, struct qemu_plugin_tb *tb)
{
	size_t n = qemu_plugin_tb_n_insns(tb), i;

	(void)id;
	for (i = 0; i < n; i++) {
		const struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);

		if (qemu_plugin_insn_size(insn) == sizeof(mark) &&
		    !memcmp(qemu_plugin_insn_data(insn), mark, sizeof(mark)))
			qemu_plugin_register_vcpu_tb_exec_cb(tb, on_mark, NO_REGISTERS, NULL);
	}
	qemu_plugin_register_vcpu_tb_exec_inline(tb, INLINE_ADD_U64, &block_of(qemu_plugin_tb_vaddr(tb), n)->executions, 1);
}

EXPORTED int qemu_plugin_install(plugin_id id, const void *info, int argc, char **argv)
{
	int i;

	(void)info;
	for (i = 0; i < argc; i++)
		if (!strncmp(argv[i], "out=", 4))
			out = strdup(argv[i] + 4);
	qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
	return 0;
}
