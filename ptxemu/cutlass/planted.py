"""planted.py PROGRAM [FAULT...]: tests which faults of runtime/planted.def CUTLASS's kernels detect, as 10.0 and as
12.0.

PROGRAM is ptxemu_cutlass_planted; without names all faults are tried. Exit status 1 if a kernel is wrong without a
fault, or if a fault of EXPECTED is not detected. The runs without a fault come first and translate the kernels.
"""

import concurrent.futures
import os
import pathlib
import re
import resource
import subprocess
import sys

DEFINITIONS = pathlib.Path(__file__).resolve().parents[1] / "runtime" / "planted.def"
CAPABILITIES = ("10.0", "12.0")
CPU_SECONDS = 60  # a launch that hangs is stopped, and has seen the fault
# Faults that these kernels must detect. The others concern instructions or situations that they do not have.
EXPECTED = (
    *("bfind_shiftamt", "bf16_truncates", "e2m1_nibbles", "ballot_predicate"),
    *("barrier_early", "mbarrier_early", "mbarrier_parity", "cluster_rank", "cancel_before"),
    *("tensor_swizzle", "tensor_bounds", "tensor_pair_signal", "tensor_map_dimension"),
    *("mma_no_c", "block_scale_column", "block_scale_sign"),
    *("tensor_memory_columns", "tcgen05_accumulates", "tcgen05_commit_early", "tcgen05_cp_lanes", "tcgen05_scale_b"),
    "tcgen05_pair_halves",
)


def limit():
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


def first_wrong(program, fault, capability):
    """Returns the first kernel and order with a wrong result or a crash, or ""."""
    environment = {**os.environ, "PTXEMU_CC": capability}
    done = subprocess.run(
        [program, fault],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=limit,
    )
    if done.returncode == 0:
        return ""
    names = [line for line in done.stdout.splitlines() if not line.startswith("wrong")]
    return names[-1] if names else "nothing ran"


def main():
    program, *only = sys.argv[1:]
    faults = re.findall(r"^PLANTED\((\w+), \"(.*)\"\)", DEFINITIONS.read_text(), re.M)
    faults = [fault for fault in faults if fault[0] in only or not only]
    for capability in CAPABILITIES:
        if wrong := first_wrong(program, "none", capability):
            print(f"without a fault as {capability}: {wrong} is wrong")
            return 1
    seen = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = {(name, cc): pool.submit(first_wrong, program, name, cc) for name, _ in faults for cc in CAPABILITIES}
        for name, what in faults:
            seen[name] = [by for cc in CAPABILITIES if (by := runs[name, cc].result())]
            print(f"  {name}: {what}: {', '.join(seen[name]) or 'not seen'}", flush=True)
    missed = [name for name in EXPECTED if name in seen and not seen[name]]
    print(f"planted faults that CUTLASS's kernels see: {sum(map(bool, seen.values()))} of {len(faults)}")
    if missed:
        print(f"expected to be seen, and were not: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
