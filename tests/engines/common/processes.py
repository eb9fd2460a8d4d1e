"""A process for an engine, with its output in a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


class Process:
    """Runs `python SCRIPT ARGUMENT...` in a session of its own, since an engine's children may outlive it. Its output
    goes to folder/NAME.log."""

    def __init__(
        self, script: Path, *arguments: object, env: dict[str, str], folder: Path, name="run", cwd=None
    ) -> None:
        self._log = folder / f"{name}.log"
        command = [sys.executable, str(script), *map(str, arguments)]
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=cwd, start_new_session=True
            )

    def wait(self, limit_s: float) -> int | None:
        """Returns its exit status, or None if it had to be ended. Its children are gone too."""
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.stop()

    def stop(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")
