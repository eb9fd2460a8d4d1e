"""README's "Serve with vLLM", as far as a CPU can: vLLM takes the line as it is written, and its options serve a model.

A tiny model of the same kind replaces the published one, and the engine runs without the server.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from jobs import job, ok

ROOT = Path(__file__).resolve().parents[3]
(BLOCK,) = re.findall(r"```sh\n(pip install vllm.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


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


def test_the_line_serves_a_model_through_the_library(made, serve):
    arguments = served_arguments()
    assert arguments.pop("model_tag") == "nvidia/Qwen3-30B-A3B-NVFP4"
    assert arguments == {"max_model_len": 8192}
    arguments["max_model_len"] = 128  # of the tiny model
    result = ok(serve([job("readme", made[0]["modelopt"], options=arguments)])["readme"])
    assert result["methods"] == ["NvFp4MoeModelOptMethod"] * 2 and all(result["layers"])
    assert all(prompt["tokens"] for prompt in result["runs"][0])
