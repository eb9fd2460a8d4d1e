"""bench/measure_sglang_serve.py without an engine: a server that answers as SGLang does, and a client of its form."""

from __future__ import annotations

import json
import shlex
import signal
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors.torch")

import measure_vllm_serve as measure  # noqa: E402
from sglang_server import Server  # noqa: E402
from vllm_server import Deadline, OutOfTime, ServerFailed  # noqa: E402

# The token after t is 3 t + 1 (mod 89). A server of a model named "wrong" has it one higher.
FAKE = """
import http.server, json, os, sys
word = lambda name: sys.argv[sys.argv.index(name) + 1]
assert word("--host") == "127.0.0.1"
print("mode", os.environ["NVFP4_MOE_MODE"], *sys.argv, flush=True)
off = word("--model-path").endswith("wrong") and "--moe-runner-backend" in sys.argv
def after(token):
    return (3 * token + 1 + off) % 89
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *rest):
        pass
    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        assert self.path == "/health"
        self.answer(b"")
    def do_POST(self):
        assert self.path == "/generate"
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = asked["input_ids"]
        said, now = [], text[-1]
        for _ in range(asked["sampling_params"]["max_new_tokens"]):
            said.append(now := after(now))
        meta = {}
        if asked.get("return_logprob"):
            assert asked["logprob_start_len"] == 0
            own, top = [[None, text[0], None]], [None]
            for before, token in zip(text, text[1:]):
                best = after(before)
                own.append([-0.25 if token == best else -4.0, token, None])
                top.append([[-0.25, best, None]] + [[-5.0 - i, (best + 1 + i) % 89, None] for i in range(4)])
            meta = {"input_token_logprobs": own, "input_top_logprobs": top}
        self.answer(json.dumps({"text": "", "output_ids": said, "meta_info": meta}).encode())
http.server.HTTPServer(("127.0.0.1", int(word("--port"))), Handler).serve_forever()
"""
CLIENT = """
import json, sys, time
word = lambda name: sys.argv[sys.argv.index(name) + 1]
prompts = int(word("--num-prompts"))
if word("--random-input-len") == "7":
    time.sleep(60)
if word("--random-input-len") == "8":
    raise ValueError("Warmup failed")
fields = "duration total_input_tokens total_output_tokens request_throughput output_throughput mean_ttft_ms \\
median_ttft_ms p99_ttft_ms mean_itl_ms median_itl_ms p99_itl_ms".split()
said = dict.fromkeys(fields, 1.23456) | {"completed": prompts - (word("--random-input-len") == "9")}
said |= {"total_throughput": 3.0, "argv": sys.argv[1:]}
with open(word("--output-file"), "a") as file:
    file.write(json.dumps(said) + "\\n")
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(*words) runs the script and returns its status. model, twin, wrong: models of its folder."""
    for name in ("model", "twin", "wrong"):
        (tmp_path / name).mkdir()
        config = {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 89}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(Server, "versions", staticmethod(lambda: {"sglang": "1.0"}))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "client").mkdir()
    (tmp_path / "client/sglang").mkdir()
    (tmp_path / "client/sglang/__init__.py").write_text("")
    (tmp_path / "client/sglang/bench_serving.py").write_text(CLIENT)
    monkeypatch.syspath_prepend(str(tmp_path / "client"))
    for name in ("sglang", "sglang.bench_serving"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def script(*words):
        program = shlex.join([sys.executable, "-c", FAKE])
        monkeypatch.setattr(sys, "argv", ["measure", *words, "--commit", "abc", "--program", program])
        return measure.main(Server)

    before = signal.getsignal(signal.SIGTERM)
    yield script
    signal.signal(signal.SIGTERM, before)


def test_tokens_of_a_right_server_are_the_twins(run, tmp_path):
    assert run("tokens", "model", "twin", "out.json", "--modes", "graphs", "--tokens", "5") == 0
    cells = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert [cell["backend"] for cell in cells] == ["twin", "nvfp4_moe", "marlin"]
    for cell in cells:
        assert cell["right"] and cell["greedy_the_same_until_the_first_other"] == cell["greedy_tokens"] == 8 * 5
        assert cell["positions"] == 8 * (24 + 5 - 1) and cell["rms_error"] == 0


def test_tokens_of_a_wrong_server_are_seen(run, tmp_path):
    assert run("tokens", "wrong", "twin", "out.json", "--modes", "graphs", "--tokens", "5") == 1
    cells = {cell["backend"]: cell for cell in json.loads((tmp_path / "out.json").read_text())["cells"]}
    assert cells["nvfp4_moe"]["right"] and not cells["marlin"]["right"]
    assert cells["marlin"]["greedy_the_same_until_the_first_other"] == 0


def test_speed_is_measured_for_each_backend_and_goes_on_where_it_ended(run, tmp_path):
    words = ("speed", "model", "out.json", "--lengths", "32/8", "--concurrency", "1,16", "--rounds", "1")
    assert run(*words) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    assert [(cell["backend"], cell["prompts"]) for cell in record["cells"]] == [
        ("nvfp4_moe", 4), ("nvfp4_moe", 16), ("marlin", 4), ("marlin", 16),
    ]  # fmt: skip
    assert record["cells"][0]["total_token_throughput"] == 3.0 and record["cells"][0]["output_throughput"] == 1.235
    assert record["command"] == "python bench/measure_sglang_serve.py speed" and record["sglang"] == "1.0"
    logs = {name: (tmp_path / f"out.{name}.log").read_text() for name in ("nvfp4_moe", "marlin")}
    assert logs["nvfp4_moe"].startswith("mode 1 ") and "--moe-runner-backend" not in logs["nvfp4_moe"]
    assert logs["marlin"].startswith("mode 0 ") and "--moe-runner-backend marlin" in logs["marlin"]
    record["cells"].pop()
    (tmp_path / "out.json").write_text(json.dumps(record))
    assert run(*words) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    assert len(record["cells"]) == 4 and [server["backend"] for server in record["servers"]][2:] == ["marlin"]


def test_prompts_that_do_not_complete_fail_the_server(run, tmp_path):
    assert run("speed", "model", "out.json", "--lengths", "9/8", "--concurrency", "1", "--rounds", "1") == 1
    servers = json.loads((tmp_path / "out.json").read_text())["servers"]
    assert "3 of 4 prompts completed" in servers[1]["failed"][0]


def test_the_kv_cache_of_all_servers_has_the_same_size(run, tmp_path):
    options = Server.options(tmp_path / "model", 100, 8, 512, 1.0)
    assert options[options.index("--max-total-tokens") + 1] == str(2**30 // (2 * 2 * 2 * 4 * 128))


def test_the_client_ends_in_time_and_its_errors_are_the_servers(run, tmp_path):
    program = [sys.executable, "-c", FAKE]
    cell = {"input": 7, "output": 8, "prompts": 4, "concurrency": 2, "round": 0}
    with Server(program, tmp_path / "model", "marlin", [], tmp_path / "log", Deadline(60)) as server:
        with pytest.raises(ServerFailed, match="ValueError: Warmup failed"):
            server.bench(tmp_path / "model", cell | {"input": 8}, 30)
        said = server.bench(tmp_path / "model", cell | {"input": 32}, 30)["argv"]
        assert said[said.index("--max-concurrency") + 1] == "2" and "--tokenize-prompt" in said
        with pytest.raises(OutOfTime):
            server.bench(tmp_path / "model", cell, 0.5)
