"""The counts of layer.status() for the last run."""

import numpy as np
import pytest
from layers import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, batch, layer


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("activation_format", ["nvfp4", "fp8", "int8_block"])
def test_a_nan_token_counts_once_and_its_rows_each(backend, activation_format):
    one = layer(backend=backend, activation_format=activation_format)
    hidden, ids, router_weights = batch(4)
    hidden[1, 3] = np.nan
    out = one.run(hidden, ids, router_weights)
    assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2, 3]]).all()
    status = one.status()
    assert (status["nonfinite_tokens"], status["nonfinite_rows"], status["bad_expert_ids"]) == (1, TOP_K, 0)
    assert status["hidden_blocks"] == 3 * HIDDEN // 16
    assert status["intermediate_blocks"] == 3 * TOP_K * INTERMEDIATE // 16
    assert status["nonfinite_outputs"] == HIDDEN
    hidden, ids, router_weights = batch(4)
    ids[2, 0] = EXPERTS  # no such expert
    one.run(hidden, ids, router_weights)
    assert (one.status()["bad_expert_ids"], one.status()["nonfinite_tokens"]) == (1, 0)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("router_weight", ["after_down", "before_down"])
def test_status_counts_weights_and_outputs_that_are_not_finite(backend, router_weight):
    one = layer(backend=backend, router_weight=router_weight)
    random = np.random.default_rng(5)
    for tokens in (1, 9, 32):
        hidden, ids, router_weights = batch(tokens, seed=tokens)
        ids[random.random(ids.shape) < 0.2] = -1
        router_weights[random.random(ids.shape) < 0.2] = random.choice([np.nan, np.inf, -np.inf])
        hidden[0, 5] = np.nan
        ids[0, 0], router_weights[0, 0] = 3, np.nan
        out = one.run(hidden, ids, router_weights)
        status = one.status()
        assert status["nonfinite_weights"] == np.count_nonzero(~np.isfinite(router_weights) & (ids >= 0)) > 0
        assert status["nonfinite_outputs"] == np.count_nonzero(~np.isfinite(out)) >= HIDDEN
    one.run(*batch(4))
    assert one.status()["nonfinite_weights"] == one.status()["nonfinite_outputs"] == 0
    one.run(hidden, ids, router_weights)
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
