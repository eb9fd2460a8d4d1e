"""Every model class that the transformers adapter names, from NVFP4 checkpoints, and generate().

AutoModelForCausalLM.from_pretrained loads checkpoints of both formats and the producers' own exports, which are judged
at equal router decisions (model_judge.py). generate() must give the same tokens with every cache.
"""

from __future__ import annotations

import shutil

import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import model_judge as judge  # noqa: E402
import nvfp4_moe.transformers as adapter  # noqa: E402
import tiny_models as tiny  # noqa: E402
from checkpoints import raw  # noqa: E402
from tiny_models import load, logits, paths_of, stock_twin  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = ("modelopt", "compressed-tensors")
# Linears that producers quantize in addition to the experts: attention, shared experts, dense MLPs, the head.
LINEARS = r"(_proj|\.w[123]|wq_a|wq_b|wkv|wo_b|q_a_proj|lm_head|^head)$"


def judged(original, directory, stems, run=logits):
    """Loads a checkpoint and judges it: each packed module by the contract, the model around them by transformers' own
    class. Every linear of the files' stems must be packed, and is judged. Returns the paths of experts."""
    model = load(directory)
    calls, got = judge.judged(model, directory, paths_of(model, stems), run)
    experts = [p for p in calls if isinstance(model.get_submodule(p), adapter.Nvfp4Experts)]
    twin = stock_twin(original, model)
    packed = {p for p, module in model.named_modules() if isinstance(module, adapter.Nvfp4LinearModule)}
    assert packed == set(paths_of(twin, stems)) == set(calls) - set(experts)
    assert torch.equal(got, judge.replayed(twin, calls, run))
    assert got.isfinite().all() and got.std() > 0
    return experts


@pytest.mark.parametrize("output_format", FORMATS)
@pytest.mark.parametrize("kind", tiny.MODELS)
def test_experts_and_linears_at_equal_router_decisions(kind, output_format, checkpoint):
    original, directory = checkpoint(kind, output_format)
    stems = tiny.quantize_linears(directory, LINEARS, output_format=output_format)
    experts = judged(original, directory, stems)
    assert len(experts) == (1 if kind in ("deepseek_v3", "glm4_moe") else 2) and len(stems) >= 4


@pytest.mark.parametrize("producer", ["modelopt", "compressed_tensors"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_exports_of_real_producers(made, family, producer):
    """Experts, and everything else that the producers quantize."""

    def run(model):
        with torch.no_grad():
            return model(torch.arange(3, 3 + 22).reshape(2, 11) * 7 % 29 + 3, use_cache=False).logits

    directory = made(family) / producer
    leaves = (".weight_scale_2", ".weight_global_scale")
    quantized = {key.rpartition(".")[0] for key in raw(directory) if key.endswith(leaves)}
    stems = {stem for stem in quantized if ".experts." not in stem}
    assert judged(made(family) / "original", directory, stems, run)
    if producer == "modelopt":  # it leaves out only the head and the router
        assert len(stems) >= 8


def test_planted_faults_are_seen(checkpoint):
    """The original files are the judge. The model reads changed ones: an expert's doubled scale, a linear's code."""
    _, directory = checkpoint("qwen3_moe")
    (stem, *_) = tiny.quantize_linears(directory, "layers.1.self_attn.o_proj$", output_format="modelopt")
    truth = directory.with_name("truth")
    shutil.copytree(directory, truth)
    scale = "model.layers.0.mlp.experts.2.down_proj.weight_scale_2"

    def flip(key, tensor):
        if key == f"{stem}.weight":
            tensor[7, 3] ^= 0x80  # the sign of one element
        return {key: tensor}

    for change, where in (
        (lambda key, tensor: {key: tensor}, None),
        (lambda key, tensor: {key: tensor * 2 if key == scale else tensor}, "model.layers.0.mlp.experts"),
        (flip, stem),
    ):
        shutil.rmtree(directory)
        shutil.copytree(truth, directory)
        tiny.rewrite(directory, change)
        model = load(directory)
        calls, _ = judge.record(model, logits)
        outside = judge.outside(model, calls, truth, {stem: stem})
        assert [path for path, count in outside.items() if count] == ([where] if where else [])


def test_a_wrong_input_of_a_module_is_seen(checkpoint):
    """Judges the model around the modules: with another router weight, and no other change, it must fail."""
    original, directory = checkpoint("qwen3_moe")
    model = load(directory)
    calls, _ = judge.record(model, logits)
    twin = stock_twin(original, model)
    twin.model.layers[1].mlp.gate.weight.data[0] *= 1.5
    with pytest.raises(AssertionError, match="layers.1.mlp.experts: another input"):
        judge.replayed(twin, calls, logits)


# ---- generate()

PROMPT = torch.tensor([[7, 11, 13, 17, 19, 23], [101, 99, 150, 31, 5, 8]])


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """make(kind) -> a model whose experts and linears are NVFP4, loaded once."""
    root, models = tmp_path_factory.mktemp("generate"), {}

    def loaded(kind):
        if kind not in models:
            tiny.write_original(root / kind, kind)
            directory = root / f"{kind}-nvfp4"
            nv.quantize_checkpoint(root / kind, directory)
            tiny.quantize_linears(directory, r"(_proj|lm_head|wq_b|wo_b)$", output_format="modelopt")
            models[kind] = load(directory, dtype=torch.float32)
        return models[kind]

    return loaded


def tokens(model, **options):
    options |= {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    made = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **options)
    assert made.shape == (2, 14)
    return made


@pytest.mark.parametrize("kind", [kind for kind in tiny.MODELS if not kind.startswith("nemotron")])
def test_caches_give_the_same_tokens(make, kind):
    """A static cache, or none for classes that have only a cache of their own."""
    model = make(kind)
    eager = tokens(model)
    other = {"use_cache": False} if kind in ("qwen3_next", "deepseek_v4") else {"cache_implementation": "static"}
    assert torch.equal(tokens(model, **other), eager)
    assert not torch.equal(eager[0, 6:], eager[1, 6:])  # the prompt matters


def test_a_compiled_model_is_one_graph(make):
    """There is no graph break, and one graph for all token counts: the handles are constants of their modules."""
    model = make("qwen3_moe")
    graphs = []
    torch._dynamo.reset()
    compiled = torch.compile(
        model, fullgraph=True, dynamic=True, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    with torch.no_grad():
        for length in (5, 6, 9):
            ids = torch.arange(3, 3 + 2 * length).reshape(2, length)
            assert torch.equal(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    assert len(graphs) == 1
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("nvfp4_moe.moe_layer" in name for name in called) == 2
    assert sum("nvfp4_moe.linear" in name for name in called) == 9  # four of each attention, and the head
