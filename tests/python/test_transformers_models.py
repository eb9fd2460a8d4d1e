"""Every model class that the transformers adapter names, loaded by AutoModelForCausalLM.from_pretrained from NVFP4
checkpoints of both formats, judged at equal router decisions (model_judge.py)."""

from __future__ import annotations

import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
adapter = pytest.importorskip("nvfp4_moe.transformers", exc_type=ImportError)

import model_judge as judge  # noqa: E402
import tiny_models as tiny  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = ("modelopt", "compressed-tensors")
# Linears that producers quantize beside the experts: attention, shared experts, dense MLPs, the head.
LINEARS = r"(_proj|\.w[123]|wq_a|wq_b|wkv|wo_b|q_a_proj|lm_head|^head)$"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """original(kind) -> a directory with a bf16 checkpoint, made once."""
    root = tmp_path_factory.mktemp("originals")

    def make(kind: str):
        if not (root / kind).exists():
            tiny.write_original(root / kind, kind)
        return root / kind

    return make


@pytest.fixture
def quantized(original, tmp_path):
    """quantized(kind, format) -> a copy of the checkpoint whose experts are NVFP4."""

    def make(kind: str, output_format: str = "modelopt"):
        directory = tmp_path / f"{kind}-{output_format}"
        nv.quantize_checkpoint(original(kind), directory, output_format=output_format)
        return directory

    return make


def load(directory, dtype=torch.bfloat16, **options):
    """As a user does; the config where transformers does not find this adapter by itself."""
    declared = transformers.AutoConfig.from_pretrained(directory).quantization_config["quant_method"]
    given = {"quantization_config": adapter.Nvfp4MoeConfig(**options)} if options or declared != "modelopt" else {}
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **given)


def logits(model):
    ids = torch.arange(3, 3 + 22).reshape(2, 11) * 7 % 150 + 3
    return model(ids, use_cache=False).logits


def paths_of(model, stems):
    """{path of a module: stem in the files} of linears: the stem whose weight the path's rename is."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [t for t in get_model_conversion_mapping(model) if isinstance(t, WeightRenaming)]
    state = {f"{path}.weight": None for path, _ in model.named_modules()} | dict.fromkeys(model.state_dict())
    state = {name: 1 for name in state}
    found = {}
    for stem in stems:
        path = rename_source_key(f"{stem}.weight", renamings, [], model.base_model_prefix, state)[0]
        found[path.removesuffix(".weight")] = stem
    return found


def stock_twin(original, model):
    """transformers' class with the original weights. What is in the loaded model too is there in its dtype (transformers
    casts a pre-quantized model's renamed weights otherwise than a float model's), and is the same number."""
    twin = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    own = model.state_dict()
    for name, tensor in twin.state_dict().items():
        if name in own:
            assert torch.equal(own[name].double(), tensor.double()), name
    for name, tensor in (*twin.named_parameters(), *twin.named_buffers()):
        if name in own:
            tensor.data = tensor.data.to(own[name].dtype)
    return twin


@pytest.mark.parametrize("output_format", FORMATS)
@pytest.mark.parametrize("kind", tiny.MODELS)
def test_experts_and_linears_at_equal_router_decisions(kind, output_format, original, quantized, count):
    directory = quantized(kind, output_format)
    stems = tiny.quantize_linears(
        directory, LINEARS, output_format="compressed-tensors" if output_format == FORMATS[1] else "modelopt"
    )
    model = load(directory)
    calls, got = judge.record(model, logits)
    experts = [p for p in calls if isinstance(model.get_submodule(p), adapter.Nvfp4Experts)]
    assert len(experts) == (1 if kind in ("deepseek_v3", "glm4_moe") else 2)
    wrong = judge.outside(model, calls, directory, paths_of(model, stems))
    assert not any(wrong.values()), wrong
    twin = stock_twin(original(kind), model)
    again = judge.replayed(twin, calls, logits)
    assert torch.equal(got, again)
    assert got.isfinite().all() and got.std() > 0
    # Nothing was left out: all linears that were quantized run packed, but those of a class of their own.
    packed = {p for p in calls if isinstance(model.get_submodule(p), adapter.Nvfp4LinearModule)}
    assert packed <= set(paths_of(model, stems)) and len(packed) >= 4
