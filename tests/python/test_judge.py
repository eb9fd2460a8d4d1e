"""Tests of the oracle tests' judge: it must reject each planted fault."""

from __future__ import annotations

import numpy as np
import nvfp4_moe as nv
import pytest

pytest.importorskip("ml_dtypes")

import judge  # noqa: E402

X = dict(judge.samples())["normal fp32"]
CODES, SCALES, S = nv.quantize(X)
LIMITS = {"scale_roundings": 3, "code_roundings": 3, "guard": lambda exact, scales: np.zeros_like(exact, bool)}


FAULTS = {
    "one code off by one": lambda c, s: (flip(c, 1), s),
    "one sign": lambda c, s: (flip(c, 8), s),
    "nibbles swapped": lambda c, s: ((c >> 4) | (c << 4), s),
    "one scale off by one": lambda c, s: (c, plus(s, 1)),
    "one scale times or over two": lambda c, s: (c, plus(s, 8)),
    "codes of the next row": lambda c, s: (np.roll(c, 1, axis=0), s),
    "all scales at a guard": lambda c, s: (c, np.full_like(s, 0x38)),
}


def flip(codes, bit):
    at = np.argmax(codes & 7 > 1)  # a code that is neither zero nor its neighbour
    codes = codes.copy()
    codes.reshape(-1)[at] ^= bit
    return codes


def plus(scales, step):
    scales, byte = scales.copy(), int(scales[3, 7])
    scales[3, 7] = byte + step if byte + step < 0x7F else byte - step
    return scales


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("side", ["ours", "the oracle's"])
def test_planted_faults_are_found(fault, side):
    good, bad = (CODES, SCALES), FAULTS[fault](CODES, SCALES)
    assert judge.compare(X, good, good, S, **LIMITS)["codes at a tie"] == 0
    pair = (bad, good) if side == "ours" else (good, bad)
    with pytest.raises(AssertionError):
        judge.compare(X, *pair, S, **LIMITS)


def test_double_rounding_is_found():
    """Rounding to half steps first, as the Python predecessor does, moves 9 % of the codes."""
    quotient = X / (judge.e4m3(SCALES).repeat(16, axis=-1) * S)
    halves = np.sign(quotient) * np.floor(np.abs(quotient) * 2 + 0.5) / 2
    wrong = nv.pack_codes(nv.encode_e2m1(halves))
    assert 0.01 < (nv.unpack_codes(wrong) != nv.unpack_codes(CODES)).mean() < 0.2
    with pytest.raises(AssertionError, match="away from ties"):
        judge.compare(X, (CODES, SCALES), (wrong, SCALES), S, **LIMITS)
