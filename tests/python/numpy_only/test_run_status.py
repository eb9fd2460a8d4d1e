"""The counts of layer.status() for the last run."""

import numpy as np
import pytest
from layers import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, batch, layer


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("activation_format", ["nvfp4", "fp8", "int8_block"])
def test_each_count_is_of_the_last_run(backend, activation_format):
    one = layer(backend=backend, activation_format=activation_format)
    hidden, ids, router_weights = batch(4)
    hidden[1, 3] = np.nan
    ids[2, 0] = EXPERTS  # no such expert
    ids[3] = 0, -1
    router_weights[3] = np.nan  # the second one is not used
    out = one.run(hidden, ids, router_weights)
    assert np.isnan(out[[1, 3]]).all() and np.isfinite(out[[0, 2]]).all()
    status = one.status()
    assert (status["nonfinite_tokens"], status["nonfinite_rows"], status["bad_expert_ids"]) == (1, TOP_K, 1)
    assert (status["nonfinite_weights"], status["nonfinite_outputs"]) == (1, 2 * HIDDEN)
    assert status["hidden_blocks"] == 3 * HIDDEN // 16
    assert status["intermediate_blocks"] == (2 * TOP_K) * INTERMEDIATE // 16
    one.run(*batch(4))
    counts = ("bad_expert_ids", "nonfinite_tokens", "nonfinite_rows", "nonfinite_weights", "nonfinite_outputs")
    assert not any(one.status()[name] for name in counts)
    one.run(*batch(0))
    assert not any(one.status().values())


def test_status_tells_an_overflow():
    hidden, ids, router_weights = batch(8)
    one = layer(row_format="fp32")
    router_weights *= np.float32(2 * 65504) / np.abs(one.run(hidden, ids, router_weights)).max()
    wide = one.run(hidden, ids, router_weights)
    assert one.status()["nonfinite_outputs"] == 0
    out = one.run(hidden, ids, router_weights, np.empty(hidden.shape, np.float16))
    status = one.status()
    assert status["nonfinite_tokens"] == status["nonfinite_weights"] == status["nonfinite_rows"] == 0
    beyond = np.abs(wide) >= 65520  # halfway to what would follow 65504
    assert status["nonfinite_outputs"] == np.count_nonzero(beyond) and 0 < np.count_nonzero(beyond) < beyond.size
    assert np.array_equal(np.isfinite(out), ~beyond)
