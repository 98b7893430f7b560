#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""Prints what plugin.c counted in the guest, by function: table.py DIR TOP [SYMBOL]."""

import bisect
import collections
import sys


def main():
    folder, top, per = sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""
    symbols = read_symbols(f"{folder}/kallsyms")
    starts = [start for start, _ in symbols]
    # The dumps 0 and 2 are of what came before each of the two runs.
    runs = [read_counts(f"{folder}/out.{run}") for run in (1, 3)]
    columns = []
    for run in runs:
        scale = 1 / calls_of(per, symbols, run) if per else 1.0
        column = collections.Counter()
        for start, instructions, executions in run:
            index = bisect.bisect_right(starts, start) - 1
            column[symbols[index][1] if index >= 0 else "(programs)"] += instructions * executions * scale
        columns.append(column)
    unit = f"a call of {per}" if per else "in all"
    print(f"instructions {unit:<43}{'EEVDF':>14}{'scheduler':>14}{'difference':>14}")
    line("(everything)", *(sum(column.values()) for column in columns))
    names = set().union(*columns)
    for name in sorted(names, key=lambda name: -max(column[name] for column in columns))[:top]:
        line(name, *(column[name] for column in columns))


def calls_of(name, symbols, run):
    """How often the function called name was entered; never 0."""
    entry = next((start for start, symbol in symbols if symbol == name), None)
    if entry is None:
        sys.exit(f"the guest's kernel has no function {name} (--per)")
    calls = sum(executions for start, _, executions in run if start == entry)
    if not calls:
        sys.exit(f"{name} was not called (--per)")
    return calls


def read_symbols(path):
    """(address, name) of all functions, in order. Addresses of programs are below all of them."""
    symbols = []
    with open(path, encoding="ascii") as file:
        for text in file:
            address, kind, name = text.split()[:3]
            if kind in "tTwW":
                symbols.append((int(address, 16), name))
    return sorted(symbol for symbol in symbols if symbol[0] >= 1 << 63)


def read_counts(path):
    """(address, instructions, executions) of each block."""
    with open(path, encoding="ascii") as file:
        fields = (text.split() for text in file)
        return [(int(start, 16), int(instructions), int(executions)) for start, instructions, executions in fields]


def line(name, before, after):
    print(f"{name[:55]:<56}{before:14.1f}{after:14.1f}{after - before:+14.1f}")


main()
