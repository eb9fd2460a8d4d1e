"""Runs the tests with planted faults: names on standard input, "name<TAB>first test that fails" on standard output.

A process of its own, since its emulator is the one that can be given faults. Each fault gets a fork, since some crash.
"""

import inspect
import os
import signal
import sys

from trial import emulator as emulators
from trial import test_barriers, test_copies, test_launches, test_matrices, test_memory, test_scalars, test_warps

MODULES = (test_warps, test_memory, test_barriers, test_copies, test_matrices, test_launches, test_scalars)
SECONDS = 60


def trials():
    """(name, call) of every test and its parameters; those that read what a process prints are left out."""
    for module in MODULES:
        for name, function in vars(module).items():
            if (
                not name.startswith("test_")
                or not inspect.isfunction(function)
                or "capfd" in inspect.signature(function).parameters
            ):
                continue
            choices = [{}]
            for mark in getattr(function, "pytestmark", []):
                names = [part.strip() for part in mark.args[0].split(",")]
                rows = [row if len(names) > 1 else (row,) for row in mark.args[1]]
                choices = [{**old, **dict(zip(names, row, strict=True))} for old in choices for row in rows]
            for chosen in choices:
                yield f"{name}{chosen or ''}", lambda device, f=function, c=chosen: f(device, **c)


def first_failure(fault):
    """The first test that fails with this fault, in a process of its own; None where all pass."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.alarm(SECONDS)
        device = emulators.Emulator(planted=True)
        assert device.cuda.ptxemu_plant(b"" if fault == "none" else fault.encode())
        for name, trial in trials():
            os.write(writer, f"{name}\n".encode())
            try:
                trial(device)
            except BaseException:
                os._exit(1)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as names:
        begun = names.read().splitlines()
    status = os.waitpid(child, 0)[1]
    return None if status == 0 else begun[-1]


def main():
    for line in sys.stdin:
        fault = line.strip()
        print(f"{fault}\t{first_failure(fault) or ''}", flush=True)


if __name__ == "__main__":
    main()
