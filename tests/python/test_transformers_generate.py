"""generate() of NVFP4 models: eager, with a static cache, and compiled, the same tokens."""

from __future__ import annotations

import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import nvfp4_moe.transformers as adapter  # noqa: E402
import tiny_models as tiny  # noqa: E402
from tiny_models import load  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

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
    made = model.generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        max_new_tokens=8,
        min_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    assert made.shape == (2, 14)
    return made


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "minimax_m2"])
def test_a_static_cache_gives_the_same_tokens(make, kind):
    model = make(kind)
    eager = tokens(model)
    assert torch.equal(tokens(model, cache_implementation="static"), eager)
    assert not torch.equal(eager[0, 6:], eager[1, 6:])  # the prompt matters


@pytest.mark.parametrize("kind", ["qwen3_next", "deepseek_v4"])
def test_caches_of_a_class_of_their_own(make, kind):
    """These classes have no static cache: as the same model without a cache."""
    model = make(kind)
    assert torch.equal(tokens(model), tokens(model, use_cache=False))


def test_a_compiled_model_is_one_graph(make):
    """No graph break, and one graph for other token counts: the handles are constants of their modules."""
    model = make("qwen3_moe")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    with torch.no_grad():
        for length in (5, 6, 9):
            ids = torch.arange(3, 3 + 2 * length).reshape(2, length)
            assert torch.equal(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    assert len(graphs) == 1
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("nvfp4_moe.moe_layer" in name for name in called) == 2
    assert sum("nvfp4_moe.linear" in name for name in called) == 9  # four of each attention, and the head


def test_compiled_generation_gives_the_same_tokens(make):
    """As generate() compiles with a static cache: fullgraph, through the compiler's own fakes and functionalization."""
    model = make("qwen3_moe")
    eager = tokens(model)
    compile_config = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compile_config._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    made = tokens(model, cache_implementation="static", compile_config=compile_config)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1  # it was compiled
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch.equal(made, eager)


def test_a_longer_prompt_than_one_run_takes(make):
    """A prompt in parts gives what it gives at once: a token's bits do not depend on its batch under this backend."""
    model = make("qwen3_moe")
    eager = tokens(model)
    modules = [m for m in model.modules() if isinstance(m, (adapter.Nvfp4Experts, adapter.Nvfp4LinearModule))]
    kept = [module.max_tokens for module in modules]
    try:
        for module in modules:
            module.max_tokens = 5
        assert torch.equal(tokens(model), eager)
    finally:
        for module, most in zip(modules, kept, strict=True):
            module.max_tokens = most
