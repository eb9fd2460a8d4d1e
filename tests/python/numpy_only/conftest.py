"""The tests of this folder need only NumPy and pytest, and skip nothing. test_wheel.py runs them again in an
environment with only these, against the wheel. A test that needs torch or another oracle belongs one folder up.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from qwen3_moe import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """(directory of a small Qwen3-MoE in bfloat16, tensors as bfloat16 bits)"""
    directory = tmp_path_factory.mktemp("qwen3_moe")
    return directory, write_model(directory)
