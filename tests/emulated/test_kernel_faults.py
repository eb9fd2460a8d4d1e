"""Checks the kernels' tests: each fault of kernel_faults.py, planted in the kernels' PTX, must be detected by its test.

Wrong values or the checker of order detect it. Compiling takes minutes, so this runs only if PTXEMU_KERNEL_FAULTS is
set.
"""

import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys

import pytest
from kernel_faults import FAULTS

# Faults that no test detects, with the reason.
SURVIVORS = {
    "stores_before_the_kernel_before": "consumers store only after their producer's bytes, which come after its own wait",
    "tensor_stores_before_the_kernel_before": "the epilogue stores only after gathered rows, which come after their own wait",
    "dequantized_without_proxy_fence": "who multiplies has one of its own",
    "real_values_beyond_k": "weights are 0 there, and what stands at the row's beginning is read instead",
}
HERE = pathlib.Path(__file__).resolve().parent
PROGRAMS = HERE.parents[1] / "build/cpu/tests"


def run(test, fault, checked, multiprocessors):
    """Returns a test's output with a fault planted."""
    capability, program, name = test.split()
    environment = os.environ | {
        "PTXEMU_CC": capability,
        "PTXEMU_EDIT": f"'{sys.executable}' -S -E '{HERE / 'kernel_faults.py'}' {fault}",
        "PTXEMU_ORDER": "at-once",
        "PTXEMU_SMS": str(multiprocessors),
        "PTXEMU_CHECK": "order" if checked else "",
        "PTXEMU_CHECK_KNOWN": str(HERE / "known_orders.txt"),
    }
    command = [str(PROGRAMS / f"emulated_{program}"), f"--gtest_filter={name}"]
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1200
        )
    except subprocess.TimeoutExpired as stopped:
        return "did not end\n" + (stopped.stdout or b"").decode()
    return done.stdout


def seen(fault):
    """Returns how a fault was detected: "order", "values", "stopped" (by another report), or "" if it was not."""
    said = run(fault.test, fault.name, fault.order, fault.multiprocessors)
    assert f"planted {fault.name}" in said, f"{fault.name}: nothing to edit\n{said}"
    if "[  FAILED  ]" not in said and "did not end" not in said:
        return ""
    if "ptxemu: order: a" in said:
        return "order"
    return "stopped" if re.search("^ptxemu: (?!planted|order)", said, re.M) or "did not end" in said else "values"


@pytest.mark.skipif(not os.environ.get("PTXEMU_KERNEL_FAULTS"), reason="minutes long: set PTXEMU_KERNEL_FAULTS")
def test_every_fault_in_a_kernel_is_seen(capsys):
    chosen = [fault for fault in FAULTS if re.search(os.environ["PTXEMU_KERNEL_FAULTS"], fault.name)]
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("PTXEMU_JOBS", os.cpu_count()))) as pool:
        how = dict(zip((fault.name for fault in chosen), pool.map(seen, chosen), strict=True))
    with capsys.disabled():
        print()
        for fault in chosen:
            print(f"  {fault.name}: {fault.what}: {how[fault.name] or 'NOT SEEN, ' + SURVIVORS.get(fault.name, '?')}")
        print(f"faults in kernels seen: {sum(map(bool, how.values()))} of {len(chosen)}")
    wrong = [fault.name for fault in chosen if fault.order and how[fault.name] not in ("order", "stopped", "")]
    assert not wrong, "seen by values where the checker of order should have been first"
    assert {name for name, way in how.items() if not way} == {n for n in SURVIVORS if n in how}
