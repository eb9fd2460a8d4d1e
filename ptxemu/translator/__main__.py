"""python3 -m translator FILE.ptx --kernel NAME --output LIB.so: translates one kernel to a library for the run time.

Without --kernel: translates every kernel, compiles none, and prints their number (exit code 1 if one fails).
--serve: reads the arguments of such calls from stdin, a line each, separated by tabs, and answers each.
"""

import argparse
import hashlib
import io
import os
import pathlib
import sys

from .errors import TranslationError
from .module import Module
from .program import program

# In most tests compiling takes more than half of the processor time, so passes that take a fifth of it are off.
OPTIMIZATION = "-Og -fira-region=one -fno-dce -fno-tree-pta -fno-ipa-pure-const -fno-ipa-reference"
HOME = pathlib.Path(__file__).resolve().parent.parent
# A fault leaves a kernel by a switch to the scheduler's stack, so no exception passes through a kernel. Exception edges
# of all calls took a third of g++'s time.
FLAGS = [
    "-std=c++20",
    "-march=native",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-fno-exceptions",
    "-fPIC",
    "-w",
    "-DPTXEMU_KERNEL",
]


def run(command):
    """The exit code. Not by subprocess, whose import takes longer than the linker."""
    return os.spawnvp(os.P_WAIT, command[0], command)


def precompiled(folder, flags):
    """The run time's header, compiled once for these flags and this text: most kernels are shorter than it."""
    digest = hashlib.sha256(" ".join(flags).encode())
    for header in sorted((HOME / "runtime").iterdir()):
        if header.suffix == ".h" or "-DPTXEMU_PLANT" in flags:
            digest.update(header.read_bytes())
    header = folder / f"header-{digest.hexdigest()[:16]}" / "kernel.h"
    compiled = header.with_suffix(".h.gch")
    if not compiled.exists():
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text('#include "runtime/kernel.h"\n')
        draft = header.with_suffix(f".{os.getpid()}.gch")
        if run([*flags, "-x", "c++-header", str(header), "-o", str(draft)]):
            raise SystemExit(f"ptxemu: {flags[0]} failed on {header}")
        draft.rename(compiled)
    return header


def compile_kernel(text, output, planted, checked):
    """Leaves the library at `output`; other processes see it whole or not at all."""
    source = output.with_suffix(".cpp")
    source.write_text(text)
    draft = output.with_suffix(f".{os.getpid()}.so")
    options = [*os.environ.get("PTXEMU_OPTIMIZE", OPTIMIZATION).split(), *(["-DPTXEMU_PLANT"] if planted else [])]
    options += ["-DPTXEMU_CHECK"] if checked else []
    flags = [os.environ.get("CXX", "g++"), *FLAGS, *options, f"-I{HOME}"]
    header = precompiled(output.parent, flags)
    # Without libstdc++, which libptxemu.so contains, the linker takes a third of the time.
    link = ["-shared", "-nostdlib", "-include", str(header), str(source), "-lm", "-lgcc", "-o", str(draft)]
    if run([*flags, *link]):
        raise SystemExit(f"ptxemu: {flags[0]} failed on {source}")
    draft.rename(output)


def serve():
    """Answers end with a zero byte: the exit code and the messages. The compiler's own output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        sys.stderr = io.StringIO()
        try:
            code = main(line.rstrip("\n").split("\t"))
        except SystemExit as ended:
            print(ended, file=sys.stderr)
            code = 1
        print(code, sys.stderr.getvalue(), sep="", end="\0", file=answers, flush=True)
        sys.stderr = sys.__stderr__
    return 0


def main(arguments):
    parser = argparse.ArgumentParser(prog="translator", description=__doc__.splitlines()[0])
    parser.add_argument("ptx", type=pathlib.Path)
    parser.add_argument("--kernel")
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--plant", action="store_true", help="with the faults of runtime/planted.def")
    parser.add_argument("--check", action="store_true", help="with the hooks of runtime/order.h")
    options = parser.parse_args(arguments)
    try:
        module = Module(options.ptx.read_text())
        if options.kernel:
            entries = [entry for entry in module.entries() if entry.name == options.kernel]
            if not entries:
                raise TranslationError(f"no kernel {options.kernel}")
            compile_kernel(program(module, entries[0]), options.output, options.plant, options.check)
            return 0
        failed = 0
        for entry in module.entries():
            try:
                program(Module(options.ptx.read_text()), entry)
            except TranslationError as error:
                failed += 1
                print(f"ptxemu: {error.located(options.ptx)}", file=sys.stderr)
    except TranslationError as error:
        print(f"ptxemu: {error.located(options.ptx)}", file=sys.stderr)
        return 1
    print(f"{options.ptx}: {len(module.entries()) - failed} of {len(module.entries())} kernels")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1:] == ["--serve"] else main(sys.argv[1:]))
