"""Proves of every difference from an oracle that it is one of those the formats allow, and counts them.

An oracle computes its quotients in float32 with n roundings, each within 2^-24 relative; ours are exact and rounded
once. A float32 quotient can cross a rounding threshold t only if the exact one lies within n * 2^-24 * t of it (the
factor 1 + 2^-20 covers the products of the small terms). So every differing code or scale must lie that close to a
threshold, or be a guard of the oracle.
The exact quotients are float64: x, the E4M3 scale and the tensor scale have at most 24 + 4 + 24 significant bits, so
the product is exact and the quotient within 2^-53.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

E2M1_THRESHOLDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_E4M3 = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E4M3_THRESHOLDS = (_E4M3[1:] + _E4M3[:-1]) / 2


def near_threshold(exact: np.ndarray, thresholds: np.ndarray, roundings: int) -> np.ndarray:
    """Returns whether a float32 computation with that many roundings may move exact across a threshold."""
    magnitude = np.abs(exact)
    above = np.clip(np.searchsorted(thresholds, magnitude), 0, len(thresholds) - 1)
    below = np.clip(above - 1, 0, len(thresholds) - 1)
    distance = np.minimum(np.abs(magnitude - thresholds[above]), np.abs(magnitude - thresholds[below]))
    return distance <= roundings * 2.0**-24 * magnitude * (1 + 2.0**-20)


def without_negative_zero(codes: np.ndarray) -> np.ndarray:
    """Codes 0..15 with -0 as 0: implementations disagree on its sign."""
    return np.where(codes == 8, 0, codes)


def e4m3(scales: np.ndarray) -> np.ndarray:
    return scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def unpack(codes: np.ndarray) -> np.ndarray:
    """Written out here so that the judge shares nothing with what it judges."""
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def scale_quotients(x: np.ndarray, tensor_scale: float) -> np.ndarray:
    """Exact amax/(6 s) per block of 16."""
    amax = np.abs(x.astype(np.float64)).reshape(*x.shape[:-1], -1, 16).max(-1)
    return amax / (6.0 * np.float64(tensor_scale))


def compare(x, ours, oracle, tensor_scale, *, scale_roundings, code_roundings, guard):
    """Compares our quantization with an oracle's.

    x (rows, K) float32; ours and oracle (codes, scales) uint8. guard(exact quotients, oracle's scale bytes) marks the
    blocks in which the oracle's guard acts. Returns counts and asserts that nothing else differs.
    """
    our_codes, our_scales = unpack(ours[0]), ours[1]
    their_codes, their_scales = unpack(oracle[0]), oracle[1]
    exact = scale_quotients(x, tensor_scale)
    guarded = guard(exact, their_scales)
    scale_differs = our_scales != their_scales
    near = near_threshold(exact, E4M3_THRESHOLDS, scale_roundings)
    unexplained = scale_differs & ~guarded & ~near
    assert not unexplained.any(), f"scale bytes differ away from ties and guards at {np.argwhere(unexplained)[:5]}"
    # A near-tie moves a byte by one, never further.
    step = np.abs(our_scales.astype(int) - their_scales.astype(int))
    assert (step[scale_differs & ~guarded] == 1).all()

    def check_codes(codes, scales, name, roundings):
        """Checks codes against the exact quotient with the same scale that they were made with."""
        divisor = np.repeat(e4m3(scales) * np.float64(tensor_scale), 16, axis=-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient = np.where(divisor > 0, x.astype(np.float64) / divisor, 0.0)
        magnitude = np.abs(quotient)
        # Ties go to the even code: a threshold between an even and an odd code belongs to the even one.
        low = np.searchsorted(E2M1_THRESHOLDS, magnitude, side="left")
        high = np.searchsorted(E2M1_THRESHOLDS, magnitude, side="right")
        expected = np.where(low == high, low, np.where(low % 2 == 0, low, high)).astype(np.uint8)
        expected = np.where(np.signbit(x) & (expected > 0), expected | 8, expected)
        differs = without_negative_zero(codes) != expected
        allowed = near_threshold(quotient, E2M1_THRESHOLDS, roundings)
        bad = differs & ~allowed
        assert not bad.any(), f"{name} codes differ away from ties at {np.argwhere(bad)[:5]}"
        return differs

    assert not check_codes(our_codes, our_scales, "our", 0).any(), "our codes are not the exact quotients'"
    theirs_off = check_codes(their_codes, their_scales, "the oracle's", code_roundings)
    same_scale = np.repeat(~scale_differs, 16, axis=-1)
    code_differs = (without_negative_zero(our_codes) != without_negative_zero(their_codes)) & same_scale
    assert not (code_differs & ~theirs_off).any()
    return {
        "scales": int(scale_differs.size),
        "scales at a guard": int((scale_differs & guarded).sum()),
        "scales at a tie": int((scale_differs & ~guarded).sum()),
        "codes": int(code_differs.size),
        "codes at a tie": int(code_differs.sum()),
    }


def samples(seed: int = 0, rows: int = 64, cols: int = 512):
    """Yields (name, x float32) to compare quantizers on. bfloat16 values have many exact ties, float32 few."""
    rng = np.random.default_rng(seed)

    def bf16(x):
        return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)

    normal = rng.standard_normal((rows, cols))
    spread = normal * np.exp2(rng.uniform(-14, 0, (rows, cols // 16)).repeat(16, axis=1))
    outliers = normal.copy()
    outliers[rng.random((rows, cols)) < 0.001] *= 60
    guards = normal.copy()
    guards.reshape(rows, -1, 16)[:, ::3] = 0  # blocks of zeros
    guards.reshape(rows, -1, 16)[:, 1::3] *= np.exp2(rng.uniform(-40, -8, (rows, len(range(1, cols // 16, 3)), 1)))
    grid = rng.integers(-96, 97, (rows, cols)) / 8.0  # multiples of 1/8: a power-of-two scale puts many at ties
    grid.reshape(rows, -1, 16)[..., 0] = 6 * np.exp2(rng.integers(0, 3, (rows, cols // 16)))
    yield "normal bf16", bf16(normal * 0.02)
    yield "normal fp32", (normal * 0.02).astype(np.float32)
    yield "14 octaves bf16", bf16(spread)
    yield "14 octaves fp32", spread.astype(np.float32)
    yield "outliers bf16", bf16(outliers)
    yield "zero and tiny blocks", bf16(guards)
    yield "grid of eighths", grid.astype(np.float32)


def report(count, name: str, counts: dict[str, int]) -> None:
    count(f"{name}: scales at a guard", counts["scales at a guard"], counts["scales"])
    count(f"{name}: scales at a tie", counts["scales at a tie"], counts["scales"])
    count(f"{name}: codes at a tie", counts["codes at a tie"], counts["codes"])
