"""The checker of order: each litmus test is clean as it stands, and each edit that leaves an order out is reported."""

import numpy as np
import pytest

from trial import litmus, litmus_matrices
from trial.emulator import LaunchError, line_of, ptx
from trial.litmus import SHARED, START

LITMUS = litmus.LITMUS + litmus_matrices.LITMUS
ORDERS = ("at-once", "late")


def run(emulator, case, body, order):
    text = ptx(START + body, "ao", shared=SHARED, target=case.target)
    source, out = emulator.put(np.zeros(1024, np.uint32)), emulator.empty(4096)
    with emulator.order(order), emulator.checked():
        emulator.launch(emulator.kernel(text, "test"), [source, out], **case.options)


def is_said(report, text, parts, missing):
    """Whether a finding names these two lines, in whichever order they ran, and what would order them."""
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
