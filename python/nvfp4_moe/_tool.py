"""The script nvfp4-moe of the package: the command line tool, which is in the compiled module."""

from __future__ import annotations

import os
import sys

from . import _core


def main() -> int:
    """Runs the tool with the arguments of this process. Returns the exit status."""
    run = getattr(_core, "run_tool", None)
    if run is None:
        print("nvfp4-moe: this package was built without NVFP4_MOE_CLI, which adds the tool", file=sys.stderr)
        return 3
    # doctor asks python3 on PATH for its engines: that is this Python, also if its environment is not active.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    return int(run([os.fsencode(word) for word in ("nvfp4-moe", *sys.argv[1:])]))
