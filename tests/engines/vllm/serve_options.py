"""python3 serve_options.py > serve_options.txt: the options of `vllm serve`, read from the installed vLLM's parser.

Each line has an option, and "VALUE" if it takes one. CI, which has no vLLM, checks the docs' commands against the list.
"""

from __future__ import annotations


def serve_options() -> str:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    lines = []
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        value = "" if action.nargs == 0 else " VALUE"
        lines += [name + value for name in action.option_strings if name.startswith("--")]
    return "\n".join(sorted(lines)) + "\n"


if __name__ == "__main__":
    print(serve_options(), end="")
