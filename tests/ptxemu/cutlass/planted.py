"""planted.py PROGRAM: which faults of runtime/planted.def CUTLASS's kernels see, as compute capability 10.0 and 12.0.

PROGRAM is ptxemu_cutlass_planted. Exit status 1 where a kernel is wrong without a fault, or where a fault that
EXPECTED names is not seen. Kernels are translated by the runs without a fault, which come first.
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
CPU_SECONDS = 200  # a launch that hangs is stopped, and has seen the fault
# What these kernels must see; others belong to instructions that they do not have, or to what they never do.
EXPECTED = ()


def limit():
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


def first_wrong(program, fault, capability):
    """The kernel and order that come out wrong or crash first, "" for none."""
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
    program = sys.argv[1]
    faults = re.findall(r"^PLANTED\((\w+), \"(.*)\"\)", DEFINITIONS.read_text(), re.M)
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
    missed = [name for name in EXPECTED if not seen.get(name)]
    print(f"planted faults that CUTLASS's kernels see: {sum(map(bool, seen.values()))} of {len(faults)}")
    if missed:
        print(f"expected to be seen, and were not: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
