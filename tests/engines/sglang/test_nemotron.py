"""A tiny Nemotron-3 without Mamba layers in SGLang's real engine: experts without a gate, relu2, among SGLang's latent projections,
shared expert, sigmoid router and factor; in each form, on two ranks, and updated from disk.

SGLang has no kernel for NVFP4 on a CPU, and none for unquantized experts without a gate: what bfloat16 can hold is measured on
transformers' model in it. SGLang puts a runner backend of its own in the place of `auto` for this model.
"""

import models
import nemotron
import pytest
import torch
from truth import Truth, measure_beside

ON_GPU = torch.cuda.is_available()
TWO_RANKS = {"variables": {} if ON_GPU else {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, "tp_size": 2}
JOBS = {
    "modelopt": ("modelopt", {}),
    "modelopt_mixed": ("modelopt_mixed", {}),
    "compressed_w4a4": ("compressed_w4a4", {}),
    "compressed_w4a16": ("compressed_w4a16", {}),
    "updated": ("wrong", {"reload": "modelopt"}),
    "tp": ("modelopt", TWO_RANKS),
    "ep": ("modelopt", TWO_RANKS | {"ep_size": 2}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """{name: directory}: a model in each form, and with its up matrices' tensor scales halved."""
    folder, model = tmp_path_factory.mktemp("nemotron"), nemotron.make(2)
    halved = {
        key: matrix._replace(tensor_scale=matrix.tensor_scale / (2 if key[2] == "up_proj" else 1))
        for key, matrix in model.experts.items()
    }
    wrong = nemotron.write(folder / "wrong", "modelopt", models.Model(halved, model.dense))
    return nemotron.write_all(folder, model) | {"wrong": wrong}


@pytest.fixture(scope="module")
def served(serve, checkpoints):
    """served(job) -> rounds, each job once."""
    done = {}

    def result(job):
        if job not in done:
            form, options = JOBS[job]
            reload = {"reload": checkpoints[options["reload"]]} if "reload" in options else {}
            rounds, status, log = serve(checkpoints[form], record=False, **(options | reload))
            assert rounds, f"{job} ended with {status}:\n{log[-3000:]}"
            assert "relu2, bf16" in log
            done[job] = rounds
        return done[job]

    return result


@pytest.fixture(scope="module")
def faults(checkpoints):
    """faults(run, what): what is further from float32 than twice what transformers' model in bfloat16 is."""
    pair = Truth(checkpoints["twin"]), Truth(checkpoints["twin"], torch.bfloat16)

    def found(run, what):
        ours, yardstick = measure_beside(*pair, run)
        print(f"\n{what}: {ours}\ntransformers in bfloat16: {yardstick}")
        assert ours.values > 100
        return [fault for fault in ours.faults(yardstick) if "values compared" not in fault]

    return found


@pytest.mark.parametrize("job", [job for job in JOBS if job not in ("updated", "tp", "ep")])
def test_each_form_says_what_transformers_says(served, faults, job):
    (run,) = served(job)
    assert faults(run, job) == []
    # The factor of the routed experts is in the router's weights for ModelOpt, and the runner's for compressed-tensors.
    producer = "modelopt" if job.startswith("modelopt") else "compressed_w4a4"
    assert run == served(producer)[0], "the same numbers in each form of a producer, to the last bit"


@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="two ranks need two GPUs")
@pytest.mark.parametrize("job", ["tp", "ep"])
def test_two_ranks_are_as_near_to_the_truth_as_one(served, faults, job):
    assert faults(served(job)[0], job) == []


def test_weights_updated_from_disk_are_the_new_ones_and_wrong_ones_are_seen(served, faults):
    wrong, right = served("updated")
    assert right == served("modelopt")[0]
    assert faults(wrong, "up's scale halved") != []
