"""Tests of the checker of order: each litmus test is clean, and each edit that removes an order is reported."""

import numpy as np
import pytest

from trial import litmus, litmus_copies, litmus_matrices
from trial.emulator import LaunchError, line_of, ptx
from trial.litmus import SHARED, START
from trial.litmus_matrices import operands, product, with_tensor_memory

LITMUS = litmus.LITMUS + litmus_copies.LITMUS + litmus_matrices.LITMUS
ORDERS = ("at-once", "late")


def run(emulator, case, body, order):
    text = ptx(START + body, "ao", shared=SHARED, target=case.target)
    source, out = emulator.put(np.zeros(1024, np.uint32)), emulator.empty(4096)
    with emulator.order(order), emulator.checked():
        emulator.launch(emulator.kernel(text, "test"), [source, out], **case.options)


def is_said(report, text, parts, missing):
    """Returns whether a finding names these two lines, in either order, and what would order them."""
    lines = [f"PTX line {line_of(text, part)}:" for part in parts if part]
    return any(all(line in one for line in lines) and missing in one for one in report.split("ptxemu: order: "))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", LITMUS, ids=lambda case: case.name)
def test_what_is_ordered_is_clean(emulator, case, order):
    run(emulator, case, case.body, order)


EDITS = [(case, *edit) for case in LITMUS for edit in case.edits]
IDS = [
    f"{case.name}: {edit[0].splitlines()[0]} -> {edit[1].splitlines()[0] if edit[1] else 'nothing'}"
    for case, *edit in EDITS
]


@pytest.mark.parametrize("case, old, new, now, before, missing", EDITS, ids=IDS)
def test_what_is_left_out_is_reported(emulator, case, old, new, now, before, missing):
    assert old in case.body
    body = case.body.replace(old, new, 1)
    text = ptx(START + body, "ao", shared=SHARED, target=case.target)
    with pytest.raises(LaunchError, match="order") as raised:
        run(emulator, case, body, "at-once")
    said = str(raised.value)
    assert is_said(said, text, (now, before), missing), said


FIRST = """
	griddepcontrol.launch_dependents;
	st.global.u32 [%rd3], 7;
"""
SECOND = """
	griddepcontrol.wait;
	griddepcontrol.launch_dependents;
	ld.global.u32 %r10, [%rd3];
	st.global.u32 [%rd2], %r10;
"""
THIRD = """
	ld.global.u32 %r10, [%rd3];
	griddepcontrol.wait;
	ld.global.u32 %r11, [%rd2];
"""
# Replacements in the second and third kernel, and the two reported lines, or None if it stays clean.
DEPENDENT = [
    (("", ""), ("", ""), None),
    (("griddepcontrol.wait;", ""), ("", ""), ("ld.global.u32 %r10", "st.global.u32 [%rd3]")),
    (("", ""), ("griddepcontrol.wait;", ""), ("ld.global.u32 %r11", "st.global.u32 [%rd2]")),
    # The first launch's writes may be read early only because the second waited before it let the third begin.
    (
        ("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;",
         "griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;"),
        ("", ""),
        ("ld.global.u32 %r10", "st.global.u32 [%rd3]"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("second, third, lines", DEPENDENT)
def test_dependent_launches(emulator, second, third, lines, order):
    """A launch that begins early is ordered only after what its predecessor had waited for when it triggered."""
    texts = [ptx(START + body, "ao", shared=SHARED) for body in (FIRST, SECOND.replace(*second), THIRD.replace(*third))]
    cells, out = emulator.put(np.zeros(64, np.uint32)), emulator.put(np.zeros(64, np.uint32))
    kernels = [emulator.kernel(text, "test") for text in texts]
    with emulator.order(order), emulator.checked():
        for i, kernel in enumerate(kernels):
            emulator.enqueue(kernel, [cells, out], programmatic=i > 0)
        if lines is None:
            emulator.finish()
            return
        with pytest.raises(LaunchError, match="missing: griddepcontrol.wait") as raised:
            emulator.finish()
    said = str(raised.value)
    assert all(f": {line}" in said for line in lines), said


def test_launches_in_turn_are_ordered(emulator):
    """Launches that are not programmatic begin once those before them have ended."""
    cells, out = emulator.put(np.zeros(64, np.uint32)), emulator.empty(256)
    kernel = emulator.kernel(
        ptx(
            START + "\n\tld.global.u32 %r9, [%rd3]; add.u32 %r9, %r9, 1; st.global.u32 [%rd3], %r9;",
            "ao",
            shared=SHARED,
        ),
        "test",
    )
    with emulator.checked():
        for _ in range(3):
            emulator.enqueue(kernel, [cells, out])
        emulator.finish()
    assert (emulator.get(cells, 32, np.uint32) == 3).all()


def test_a_report_names_both_threads_and_lines(emulator):
    body = "\n\tst.shared.u32 [%r4], %r1;\n\tld.shared.u32 %r10, [%r5];"
    text = ptx(START + body, "ao", shared=SHARED)
    with pytest.raises(LaunchError) as raised, emulator.checked():
        emulator.launch(emulator.kernel(text, "test"), [emulator.empty(64), emulator.empty(64)], block=32)
    said = str(raised.value)
    store, load = line_of(text, "st.shared"), line_of(text, "ld.shared")
    assert "a write is not ordered after an earlier read in kernel test" in said
    assert "where:   shared memory of cta (0,0,0) at 0x404" in said
    assert f"now:     thread (1,0,0) of cta (0,0,0) writes, PTX line {store}: st.shared.u32 [%r4], %r1;" in said
    assert f"before:  thread (0,0,0) of cta (0,0,0) read, PTX line {load}: ld.shared.u32 %r10, [%r5];" in said


@pytest.mark.parametrize("side", ["before", "after"])
def test_tcgen05_fences_may_be_left_out(emulator, side):
    """CUTLASS has no tcgen05.fence: PTXEMU_CHECK=order,no-tcgen05-fence asks only for the other orders."""
    (case,) = [case for case in LITMUS if case.name == "tcgen05 and tensor memory"]
    body = case.body.replace(f"tcgen05.fence::{side}_thread_sync;", "")
    text = ptx(START + body, "ao", shared=SHARED, target=case.target)
    for what in ("order", "order,no-tcgen05-fence"):
        arguments = [emulator.put(np.zeros(1024, np.uint32)), emulator.empty(4096)]
        with emulator.checked(what):
            if what == "order":
                with pytest.raises(LaunchError, match=f"missing: tcgen05.fence::{side}_thread_sync"):
                    emulator.launch(emulator.kernel(text, "test"), arguments, **case.options)
            else:
                emulator.launch(emulator.kernel(text, "test"), arguments, **case.options)


READ = """
read:
	bar.warp.sync -1;
	tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r16, %r17}, [%r11];
	tcgen05.wait::ld.sync.aligned;
"""


@pytest.mark.parametrize("wait", ["", litmus.wait("%r8", 0, "again").replace("parity.", "parity.relaxed.cluster.")])
def test_a_threads_own_products_need_no_fence(emulator, wait):
    """The thread that multiplies reads the result once it has seen its commit's phase, even by a relaxed wait."""
    body = "\n\tsetp.ge.u32 %p6, %r1, 1; @%p6 bra read;" + operands(add=False) + product("%r8") + wait + READ
    text = ptx(START + with_tensor_memory(1, body), "ao", shared=SHARED, target="sm_100a")
    arguments = [emulator.put(np.zeros(1024, np.uint32)), emulator.empty(4096)]
    with emulator.checked():
        if wait:
            emulator.launch(emulator.kernel(text, "test"), arguments)
        else:
            with pytest.raises(LaunchError, match="missing: tcgen05.commit, and a wait for its mbarrier"):
                emulator.launch(emulator.kernel(text, "test"), arguments)
