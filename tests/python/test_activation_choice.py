"""activation_format="auto": the rule, and what from_checkpoint runs by default of what a checkpoint declares."""

from __future__ import annotations

import nvfp4_moe as nv
import pytest


@pytest.mark.parametrize(
    ("declared", "backend", "expected"),
    [
        ("bf16", "sm100", "bf16"),
        ("bf16", "cpu", "bf16"),
        ("nvfp4", "sm100", "nvfp4"),
        ("nvfp4", "sm120", "nvfp4"),
        ("nvfp4", "sm90", "bf16"),
        ("nvfp4", "cuda", "bf16"),
        ("nvfp4", "cpu", "int8_block"),
        ("nvfp4", "cpu:avx2", "int8_block"),
        ("fp8", "sm90", "fp8"),
        ("fp8", "cpu", "fp8"),
        ("fp8", "sm100", "bf16"),
    ],
)
def test_the_rule_of_auto(declared, backend, expected):
    chosen, because = nv.choose_activation_format(declared, backend)
    assert chosen == expected
    assert because


def test_the_rule_refuses_other_names():
    with pytest.raises(ValueError, match="declared: expected bf16, nvfp4 or fp8, got int8_block"):
        nv.choose_activation_format("int8_block", "cpu")
    with pytest.raises(ValueError, match='backend: expected .*sm100.*, got "auto"'):
        nv.choose_activation_format("nvfp4", "auto")
