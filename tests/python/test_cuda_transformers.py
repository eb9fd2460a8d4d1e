"""NVFP4 models of transformers on a GPU: judged as on a CPU, generating eagerly, compiled and from CUDA graphs.

test_cuda_transformers_blocks.py has transformers' own blocks as the oracle. Needs transformers, torch with CUDA and a
GPU: skipped by name elsewhere.
"""

from __future__ import annotations

import nvfp4_moe as nv
import pytest
from gpu import captured, needs_gpu, torch

pytest.importorskip("transformers")

import model_judge as judge  # noqa: E402
import nvfp4_moe.transformers as adapter  # noqa: E402
import tiny_models as tiny  # noqa: E402
from tiny_models import load  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

pytestmark = needs_gpu

SIZES = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64}
PROMPT = torch.tensor([[7, 11, 13, 17, 19, 23], [101, 99, 150, 31, 5, 8]])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(directory, stems of its NVFP4 linears) of a Qwen3-MoE."""
    root = tmp_path_factory.mktemp("cuda")
    tiny.write_original(root / "original", "qwen3_moe", **SIZES)
    nv.quantize_checkpoint(root / "original", root / "nvfp4")
    return root / "nvfp4", tiny.quantize_linears(root / "nvfp4", r"(_proj|lm_head)$", output_format="modelopt")


@pytest.fixture(scope="module", params=["bf16", "nvfp4"])
def model(request, checkpoint):
    return load(checkpoint[0], activation_format=request.param).cuda()


def logits(model):
    ids = (torch.arange(3, 3 + 22).reshape(2, 11) * 7 % 150 + 3).cuda()
    return model(ids, use_cache=False).logits


def tokens(model, **options):
    prompt = PROMPT.cuda()
    mask = torch.ones_like(prompt)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(prompt, attention_mask=mask, **options)


def test_moved_layers_are_on_the_gpu_and_judged_and_loading_there_is_the_same(model, checkpoint):
    directory, stems = checkpoint
    calls, moved = judge.record(model, logits)
    assert {model.get_submodule(path).packed.device for path in calls} == {"cuda:0"}
    on_host = {path: judge.Call(tuple(t.cpu() for t in call.inputs), call.output.cpu()) for path, call in calls.items()}
    wrong = judge.outside(model, on_host, directory, tiny.paths_of(model, stems))
    assert not any(wrong.values()), wrong
    pytest.importorskip("accelerate")
    form = model.model.layers[0].mlp.experts.packed.config.activation_format
    config = adapter.Nvfp4MoeConfig(activation_format=form)
    mapped = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, device_map="cuda:0", quantization_config=config
    )
    with torch.no_grad():
        assert torch.equal(logits(mapped), moved)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_generation_with_a_static_cache_and_compiled(kind, checkpoint):
    """As generate() does on a GPU by default: a static cache compiles the decoding step, with CUDA graphs. In float32,
    because a compiler rounds bfloat16 differently from eager code, and a random model's routers turn that into other
    tokens."""
    if kind == "qwen3_moe":
        model = load(checkpoint[0], dtype=torch.float32, activation_format="nvfp4").cuda()
    else:
        model = (tiny.gpt_oss() if kind == "gpt_oss" else tiny.fresh(kind, torch.float32)).cuda()
        assert len(adapter.enable(model, activation_format="nvfp4").layers) == 2
    eager = tokens(model)
    assert not torch.equal(eager[0, 6:], eager[1, 6:])  # the prompt matters
    assert torch.equal(tokens(model, cache_implementation="static", disable_compile=True), eager)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        assert torch.equal(tokens(model, cache_implementation="static"), eager)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_captured_step_replays_as_it_runs(model):
    ids = torch.full((4, 1), 9, device="cuda")
    with torch.inference_mode():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            model(ids, use_cache=False)
        torch.cuda.current_stream().wait_stream(stream)
        graph, made = captured(lambda: model(ids, use_cache=False).logits)
        for step in range(5):
            ids.copy_(torch.randint(3, 150, (4, 1)))
            graph.replay()
            assert torch.equal(made, model(ids, use_cache=False).logits), step


def test_enable_on_the_gpu_and_back():
    torch.manual_seed(1)
    config = tiny.MODELS["qwen3_moe"]()
    config.update(SIZES)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval().cuda()
    before = torch.cuda.memory_allocated()
    done = adapter.enable(model)
    assert {layer.device for layer in done.layers} == {"cuda:0"}
    assert torch.cuda.memory_allocated() <= before - sum(layer.bytes_before for layer in done.layers)
    on_gpu = logits(model)
    weights = model.model.layers[0].mlp.experts.packed.expert(1)
    back = model.cpu().model.layers[0].mlp.experts.packed
    assert back.device == "cpu" and on_gpu.isfinite().all()
    for matrix in ("gate", "up", "down"):
        assert (back.expert(1)[matrix]["codes"] == weights[matrix]["codes"]).all()
        assert (back.expert(1)[matrix]["scales"] == weights[matrix]["scales"]).all()
