#!/usr/bin/env python3
"""Checks that every function of the C interface that returns a status is one call of guarded().

guarded() turns an exception, such as std::bad_alloc, into a status. Without it the exception would end the caller's
process, and no test with enough memory would notice. Also checks that the C++ header wraps every C function.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FUNCTION = re.compile(r"^nvfp4_moe_status (nvfp4_moe_\w+)\([^;{]*\)\s*\{\n(.*?)^\}", re.M | re.S)
# counted() of format.cpp calls guarded() and adds counts.
GUARDED = re.compile(r"  return (?:api::guarded|counted)\(.*\);\n", re.S)
STATEMENT = re.compile(r"^  [^ })]", re.M)
ANY_DECLARED = re.compile(r"^NVFP4_MOE_API [^(]*?(nvfp4_moe_\w+)\(", re.M)
DECLARED = re.compile(r"^NVFP4_MOE_API nvfp4_moe_status (nvfp4_moe_\w+)\(", re.M)


def unguarded(text):
    """Returns the names of the functions in `text` whose body is not exactly one call of guarded()."""
    return [
        name for name, body in FUNCTION.findall(text) if not GUARDED.fullmatch(body) or len(STATEMENT.findall(body)) > 1
    ]


def main():
    bad, seen = [], set()
    for file in sorted((ROOT / "src" / "c_api").glob("*.cpp")):
        text = file.read_text()
        seen |= {name for name, _ in FUNCTION.findall(text)}
        bad += [f"{file.relative_to(ROOT)}: {name}: expected a body that is one guarded()" for name in unguarded(text)]
    headers = ROOT / "include" / "nvfp4_moe"
    header, wrapper = (headers / "nvfp4_moe.h").read_text(), (headers / "nvfp4_moe.hpp").read_text()
    declared = set(DECLARED.findall(header))
    bad += [f"{name}: declared, but no definition was found in src/c_api" for name in sorted(declared - seen)]
    unwrapped = set(ANY_DECLARED.findall(header)) - set(re.findall(r"\bnvfp4_moe_\w+", wrapper))
    bad += [f"{name}: declared in nvfp4_moe.h, but nvfp4_moe.hpp does not wrap it" for name in sorted(unwrapped)]
    print("\n".join(bad), end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
