"""Starts Python processes as forks of one that has imported torch.

Importing torch takes longer than most tests of ranks. ForkServer is for the tests. `fork_server.py` is the process that
forks: it reads requests as lines of JSON from stdin. A fork runs a script, a module (-m) or code (-c) as __main__ and
ends as an interpreter does.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Forked:
    """A forked process, with what the tests need of subprocess.Popen."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.server, self.pid, self.returncode = server, pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.server.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float = 100) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Begins at the first request. The processes that it has started are killed at the end of its scope."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.started: list[Forked] = []

    def ask(self, **request: Any) -> Any:
        if self.process is None:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.process = subprocess.Popen([sys.executable, __file__], env=environment, **pipes)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, *command: str, env: dict[str, str], out: Path, err: Path | None = None) -> Forked:
        """A command is what follows `python`. `env` is the whole environment; without `err`, errors go to `out`."""
        files = [str(out), str(err or out)]
        forked = Forked(self, self.ask(command=list(command), env=env, files=files, folder=os.getcwd()))
        self.started.append(forked)
        return forked

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        for forked in self.started:
            forked.kill()
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait(30)


def serve() -> dict[str, Any]:
    """Answers requests until stdin ends. Returns only in forks, with the request."""
    own: dict[int, int] = {}
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if pid := request.get("poll"):
            if pid not in own and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                own[pid] = os.waitstatus_to_exitcode(ended[1])
            print(json.dumps(own.get(pid)), flush=True)
        elif pid := os.fork():
            print(pid, flush=True)
        else:
            return request
    sys.exit()


def become(request: dict[str, Any]) -> None:
    """Runs the command with its environment, folder and files, as __main__."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, name in enumerate(request["files"], 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    first, *arguments = request["command"]
    if first == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [first, *arguments]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    import nvfp4_moe  # noqa: F401
    import torch.distributed  # noqa: F401

    become(serve())
