"""bench/measure_vllm_serve.py without an engine: its plan, its record, its comparison; and the models it serves."""

from __future__ import annotations

import argparse
import io
import json
import sys
from types import SimpleNamespace

import numpy
import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

import make_serving_model  # noqa: E402
import measure_vllm  # noqa: E402
import measure_vllm_serve as measure  # noqa: E402
import vllm_server  # noqa: E402

TINY = {
    "layers": 2, "experts": 4, "top_k": 2, "hidden": 64, "intermediate": 32, "heads": 2, "kv_heads": 1,
    "head_dim": 32, "vocab": 96,
}  # fmt: skip


def made(monkeypatch, out, *options):
    """Runs make_serving_model.py at tiny sizes. Returns the config and all tensors."""
    sizes = [word for name, size in TINY.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    monkeypatch.setattr(sys, "argv", ["make_serving_model.py", str(out), *sizes, *options])
    make_serving_model.main()
    tensors = {}
    for shard in out.glob("*.safetensors"):
        tensors |= safetensors.load_file(shard)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(tensors)
    return json.loads((out / "config.json").read_text()), tensors


@pytest.mark.parametrize("shape", [name for name in make_serving_model.SHAPES if name != "gpt_oss_20b"])
def test_a_twin_has_the_numbers_of_its_nvfp4_model(monkeypatch, tmp_path, shape):
    """Dequantized by the library, which shares no code with the script."""
    import nvfp4_moe

    more = ["--shape", shape, *(["--pattern", "E*"] if shape.startswith("nemotron") else [])]
    config, model = made(monkeypatch, tmp_path / "model", *more)
    twin_config, twin = made(monkeypatch, tmp_path / "twin", *more, "--twin")
    assert config.pop("quantization_config")["quant_algo"] == "NVFP4" and config == twin_config
    quantized = [name.removesuffix("_scale") for name in model if name.endswith(".weight_scale")]
    assert len(quantized) >= 2 * TINY["experts"]
    for name in quantized:
        scale = model[f"{name}_scale_2"]
        floats = nvfp4_moe.dequantize(model[name], model[f"{name}_scale"], float(scale))
        assert torch.equal(torch.as_tensor(floats).float(), twin[name].float())
    for name in set(model) & set(twin) - set(quantized):
        assert torch.equal(model[name], twin[name])


def test_a_gpt_oss_twin_has_the_numbers_of_its_mxfp4_model(monkeypatch, tmp_path):
    """Dequantized here from the format's definition."""
    config, model = made(monkeypatch, tmp_path / "model", "--shape", "gpt_oss_20b")
    _, twin = made(monkeypatch, tmp_path / "twin", "--shape", "gpt_oss_20b", "--twin")
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = torch.tensor(table + [-value for value in table])
    for name in ("gate_up_proj", "down_proj"):
        stem = f"model.layers.1.mlp.experts.{name}"
        blocks, scales = model[f"{stem}_blocks"].long(), model[f"{stem}_scales"].float()
        floats = torch.stack([values[blocks % 16], values[blocks // 16]], -1).flatten(-2)
        floats = (floats * torch.exp2(scales - 127)[..., None]).flatten(-2)
        assert torch.equal(floats.transpose(1, 2), twin[stem].float())
        assert torch.equal(model[f"{stem}_bias"], twin[f"{stem}_bias"])


def test_a_pattern_must_name_each_layer(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        made(monkeypatch, tmp_path, "--shape", "nemotron3_nano", "--pattern", "LICENSE")
    assert "--pattern: expected M, E or * for each of 2 layers, got LICENSE" in capsys.readouterr().err


def asked(tmp_path, *words):
    sys_argv = ["measure_vllm_serve.py", "speed", str(tmp_path), str(tmp_path / "out.json"), "--commit", "abc", *words]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", sys_argv)
        return measure.parsed()


def test_each_round_begins_with_the_next_backend(tmp_path):
    planned = measure.plan(asked(tmp_path, "--rounds", "2", "--lengths", "32/8", "--concurrency", "1,16"))
    assert [(number, backend) for number, backend, _ in planned] == [
        (0, "nvfp4_moe"), (0, "humming"), (0, "marlin"), (1, "humming"), (1, "marlin"), (1, "nvfp4_moe"),
    ]  # fmt: skip
    assert [cell["prompts"] for cell in planned[0][2]] == [4, 16]


def test_words_after_two_dashes_are_for_the_servers(tmp_path):
    assert asked(tmp_path, "--", "--attention-backend", "TRITON_ATTN").options == ["--attention-backend", "TRITON_ATTN"]
    assert asked(tmp_path).options == []
    with pytest.raises(SystemExit):
        asked(tmp_path, "--backends", "nvfp4-moe")


def test_a_record_takes_this_librarys_other_activations_and_no_unknown_backend(tmp_path):
    more = "nvfp4_moe_fp8,nvfp4_moe_nvfp4,triton"
    assert asked(tmp_path).backends == ["nvfp4_moe", "humming", "marlin"]
    assert asked(tmp_path, "--backends", more).backends == more.split(",")
    with pytest.raises(SystemExit):
        asked(tmp_path, "--backends", "nvfp4_moe_fp4")


@pytest.mark.parametrize(("visible", "device"), [(None, "0"), ("", "0"), ("3", "3"), ("2,1", "2")])
def test_the_device_that_is_asked_is_the_first_visible_one(monkeypatch, visible, device):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(
        measure_vllm.subprocess, "run", lambda command, **_: SimpleNamespace(stdout=f"{command[-1].split('=')[1]}\n")
    )
    assert measure_vllm.ask_device("memory.used") == device


@pytest.fixture
def record(monkeypatch, tmp_path):
    """record(commit) -> measure.Record of a file, with an engine of a version."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="1.0"))
    (tmp_path / "config.json").write_text("{}")

    def make(commit):
        given = {"out": tmp_path / "out.json", "commit": commit, "options": [], "model": tmp_path}
        return measure.Record(argparse.Namespace(engine=measure.Server, **given), "a table")

    return make


def test_a_record_goes_on_where_it_ended(record):
    record("abc").add({"backend": "marlin", "concurrency": 1, "output_throughput": 2.5})
    again = record("abc")
    assert again.has(backend="marlin", concurrency=1) and not again.has(backend="marlin", concurrency=16)


def test_a_record_of_another_commit_is_refused(record):
    record("abc").write()
    with pytest.raises(SystemExit, match="made with commit abc, not def"):
        record("def")


def run(*steps, text=(1, 2, 3, 4), tokens=(3, 4), routes=None):
    """A run over one prompt (1, 2): steps are those of positions 1 to 3, and routes may be."""
    return {"texts": [list(text)], "tokens": [list(tokens)], "steps": [list(steps)], "routes": routes and [routes]}


TWIN = run({2: -1.0, 9: -2.0}, {3: -1.0, 8: -1.1}, {4: -0.5, 7: -3.0})


@pytest.mark.parametrize(
    ("other", "right", "others"),
    [
        (TWIN, True, 0),
        (run({2: -1.1, 9: -2.0}, {3: -1.1, 8: -1.0}, {4: -0.5, 7: -3.0}, tokens=(8, 5)), True, 1),  # a tie
        (run({2: -1.0, 9: -2.0}, {3: -1.0, 8: -1.1}, {4: -0.5, 7: -0.4}, tokens=(3, 7)), False, 1),  # 2.5 apart
        (run({2: -1.0, 9: -2.0}, {3: -1.0, 8: -1.1}, {4: -0.9, 7: -3.0}), False, 0),  # 0.4 off
        (run({2: -1.0, 9: -2.0}, {3: -1.0, 8: -1.1}, {4: -0.5, 7: -3.0}, tokens=(3, 6)), False, 0),
    ],
)
def test_tokens_may_differ_only_at_ties(other, right, others):
    compared = measure.compare(TWIN, other, tie=0.25, rms=0.15)
    assert compared["right"] is right and compared["others_likeliest"] == others
    assert compared["positions"] == 3 and compared["greedy_tokens"] == 2


STEPS = ({2: -1.0, 9: -2.0}, {3: -1.0, 8: -1.1}, {4: -0.5, 7: -3.0})
FAR = ({2: -1.0, 9: -2.0}, {3: -9.0, 7: -0.5}, {4: -0.5, 7: -3.0})  # the second position differs
ROUTES = [[[0, 1], [2, 3]]] * 3


@pytest.mark.parametrize(
    ("routes", "right", "positions"),
    [
        (ROUTES, False, 3),
        ([ROUTES[0], [[0, 1], [2, 5]], ROUTES[0]], True, 2),  # a tie of the second layer's router
        ([ROUTES[0], ROUTES[0], [[0, 1], [2, 5]]], False, 2),  # elsewhere
        ([[[4, 5], [2, 3]], [[0, 1], [2, 5]], ROUTES[0]], False, 1),  # too many others
        ([[[4, 5], [6, 7]]] * 3, False, 0),
    ],
)
def test_positions_of_other_experts_are_counted_and_not_compared(routes, right, positions):
    twin = run(*STEPS, routes=ROUTES)
    compared = measure.compare(twin, run(*FAR, tokens=(7, 4), routes=routes), tie=0.25, rms=0.15)
    assert compared["right"] is right
    assert compared["positions"] == positions and compared["positions_of_other_experts"] == 3 - positions


def test_routes_are_read_in_ascending_order():
    file = io.BytesIO()
    numpy.save(file, numpy.array([[[3, 1], [0, 0]], [[2, 7], [0, 0]]], numpy.uint8))
    assert vllm_server.routes_of(file.getvalue()) == [[[1, 3], [0, 0]], [[2, 7], [0, 0]]]


def test_a_record_without_time_left_is_left_for_the_next_command(monkeypatch, tmp_path, record):
    given = asked(tmp_path, "--limit-s", "1")  # less than --start-s
    monkeypatch.setattr(measure, "parsed", lambda engine: given)
    monkeypatch.setattr(measure.signal, "signal", lambda *_: None)
    assert measure.main() == measure.MISSING and not given.out.exists()


FAKE = """
import base64, http.server, io, json, os, sys
assert sys.argv[1] == "serve" and sys.argv[sys.argv.index("--host") + 1] == "127.0.0.1"
print("mode", os.environ["NVFP4_MOE_MODE"], os.environ.get("NVFP4_MOE_ACTIVATIONS"), *sys.argv, flush=True)
if "refuse" in sys.argv:
    sys.exit("RuntimeError: no kernel")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "answer" not in sys.argv:
            return
        answer = {"token_ids": asked["max_tokens"] * [7]}
        if "prompt_logprobs" in asked:
            answer["prompt_logprobs"] = [None, *({str(token): {"logprob": -1.0}} for token in asked["prompt"][1:])]
            if "--enable-return-routed-experts" in sys.argv:
                import numpy
                file = io.BytesIO()
                numpy.save(file, numpy.full((len(asked["prompt"]), 2, 2), "--moe-backend" in sys.argv, numpy.uint8))
                answer["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        self.do_GET()
        self.wfile.write(json.dumps({"choices": [answer]}).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.mark.parametrize(
    ("backend", "started_with"),
    [
        ("nvfp4_moe", "mode 1 None "),
        ("nvfp4_moe_fp8", "mode 1 fp8 "),
        ("nvfp4_moe_nvfp4", "mode 1 nvfp4 "),
        ("humming", "mode 0 None "),
        ("marlin", "mode 0 None "),
        ("triton", "mode 0 None "),
        ("twin", "mode 0 None "),
    ],
)
def test_a_server_is_ready_and_ends(tmp_path, backend, started_with):
    program = [sys.executable, "-c", FAKE]
    log = tmp_path / "log"
    with measure.Server(program, tmp_path, backend, [], log, measure.Deadline(60)) as server:
        assert server.process.poll() is None and server.ready_s > 0
        with pytest.raises(measure.ServerFailed, match="a completion failed"):
            server.ask(prompt=[1], max_tokens=1)
    assert server.process.poll() is not None
    assert log.read_text().startswith(started_with)
    stock = backend in ("humming", "marlin", "triton")
    assert (f"--moe-backend {backend}" in log.read_text()) == stock == ("--moe-backend" in log.read_text())


def test_a_backend_that_does_not_start_is_recorded_and_the_others_are_tried(tmp_path, record):
    given = asked(tmp_path, "--rounds", "1", "--backends", "humming,marlin", "--", "refuse")
    given.program = [sys.executable, "-c", FAKE]
    assert measure.measure_speed(given, measure.Deadline(None)) == 1
    servers = json.loads(given.out.read_text())["servers"]
    assert [server["backend"] for server in servers] == ["humming", "marlin"]
    assert all(server["failed"][-1] == "RuntimeError: no kernel" for server in servers)


def asked_tokens(tmp_path, *words):
    given = ["tokens", str(tmp_path), "twin", str(tmp_path / "out.json"), "--commit", "abc", "--modes", "eager"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["measure_vllm_serve.py", *given, *words, "--", "answer"])
        asked = measure.parsed()
    asked.program = [sys.executable, "-c", FAKE]
    return asked


@pytest.mark.parametrize(("options", "right"), [([], [True, True]), (["--routes"], [True, False])])
def test_routes_of_servers_are_compared(tmp_path, record, options, right):
    """The fake server of a stock backend selects other experts than the twin, with the same log-probabilities."""
    (tmp_path / "config.json").write_text('{"vocab_size": 64}')
    given = asked_tokens(tmp_path, "--backends", "nvfp4_moe,marlin", *options)
    assert measure.measure_tokens(given, measure.Deadline(None)) == (0 if all(right) else 1)
    result = json.loads(given.out.read_text())
    assert [cell["right"] for cell in result["cells"]] == right
    positions = 8 * (24 + 32 - 1)
    assert [cell["positions"] for cell in result["cells"]] == [positions if one else 0 for one in right]
    if options:
        assert [cell["positions_of_other_experts"] for cell in result["cells"]] == [0, positions]


def test_a_server_that_reports_no_routes_has_failed(tmp_path, monkeypatch, record):
    (tmp_path / "config.json").write_text('{"vocab_size": 64}')
    monkeypatch.setattr(measure.Server, "routes_options", ("--unknown",))
    with pytest.raises(measure.ServerFailed, match="expected the selected experts of every prompt, got none"):
        measure.measure_tokens(asked_tokens(tmp_path, "--routes"), measure.Deadline(None))
