"""Runs the tests with planted faults: names on standard input, "name<TAB>first test that fails" on standard output.

A separate process, because it loads the emulator with planted faults. Each fault runs in a fork, because some crash.
"""

import inspect
import os
import re
import resource
import sys

from trial import emulator as emulators
from trial import (
    test_barriers,
    test_copies,
    test_fragments,
    test_launches,
    test_layouts,
    test_matrices,
    test_memory,
    test_order,
    test_products,
    test_ranks,
    test_ranks_order,
    test_refused,
    test_scalars,
    test_tensor_pairs,
    test_warps,
)

# The tests to run first for a fault, by the beginning of its name; then all others.
HOME = {
    test_scalars: r"sh[lr]_|funnel|bf[ei]|bfind|prmt|lop3|mul_|div_|min_|nan_|ftz|setp|cvt|"
    r"f16|bf16|e[24]m|ue8m0|fma|atom",
    test_warps: r"shfl|ballot|match|redux",
    test_memory: r"bounds|shared|freed|fresh",
    test_barriers: r"m?barrier|cluster_ended",
    test_copies: r"cp_async|bulk|tensor_(swizzle|bounds|map)",
    test_fragments: r"ldmatrix_[bp]|stmatrix_b|movmatrix|mma_(e2m1|f16|s4|wraps)|e2m3",
    test_products: r"tcgen05_(scale_id|padding|negated|wraps|kind)|scale_type|tf32|tensor_copy",
    test_matrices: r"(ld|st)matrix|mma|block_scale|wgmma",
    test_refused: r"\w+_unchecked",
    test_layouts: r"wgmma_swizzle|tcgen05_(swizzle|half|scale_rows)|tensor_(load|memory)|scale_nan",
    test_tensor_pairs: r"tcgen05|tensor_pair",
    test_launches: r"cancel|dependents|cluster|graph",
    test_order: r"clock_(?!ranks|system|told)",
    test_ranks: r"turn|timer",
    test_ranks_order: r"clock_(ranks|system|told)",
}
CPU_SECONDS = 100  # a test that hangs is stopped, and has seen the fault


def trials(fault):
    """(name, call) of every test and its parameters; those that read what a process prints are left out."""
    for module in sorted(HOME, key=lambda module: not re.match(HOME[module], fault)):
        for name, function in vars(module).items():
            if (
                not name.startswith("test_")
                or not inspect.isfunction(function)
                or {"capfd", "monkeypatch"} & set(inspect.signature(function).parameters)
            ):
                continue
            choices = [{}]
            for mark in getattr(function, "pytestmark", []):
                names = [part.strip() for part in mark.args[0].split(",")]
                rows = [row if len(names) > 1 else (row,) for row in mark.args[1]]
                choices = [{**old, **dict(zip(names, row, strict=True))} for old in choices for row in rows]
            for chosen in choices:
                yield f"{name}{chosen or ''}", lambda device, f=function, c=chosen: f(device, **c)


def first_failure(fault):
    """Returns the first test that fails with this fault, in a separate process; None if all pass."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        device = emulators.Emulator(planted=True)
        assert device.cuda.ptxemu_plant(b"" if fault == "none" else fault.encode())
        for name, trial in trials(fault):
            os.write(writer, f"{name}\n".encode())
            try:
                trial(device)
            except BaseException:
                os._exit(1)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as names:
        begun = names.read().splitlines()
    status = os.waitpid(child, 0)[1]
    return None if status == 0 else begun[-1]


def main():
    for line in sys.stdin:
        fault = line.strip()
        print(f"{fault}\t{first_failure(fault) or ''}", flush=True)


if __name__ == "__main__":
    main()
