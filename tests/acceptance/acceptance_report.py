"""The report of tests/acceptance/acceptance.py: one file with a readable head followed by JSON.

It has no names of the machine, its users or its folders.
"""

import getpass
import json
import os
import pathlib
import re
import socket

import acceptance_ladder
from acceptance_results import short_name

SCHEMA = 1
MARK = "---- the same, as JSON ----"
NAMES_OF_NOBODY = {"root", "user", "ubuntu", "debian", "admin", "test", "localhost", "nobody"}


class Scrubber:
    """Removes names, paths and addresses of the machine or its owner from texts, also in lists and dictionaries."""

    def __init__(self, root, *, home_folder=None, user=None, host=None):
        folder = home_folder if home_folder is not None else str(pathlib.Path.home())
        host = host if host is not None else socket.gethostname()
        try:
            user = user if user is not None else getpass.getuser()
        except (KeyError, OSError):
            user = ""
        self.replaced = [(re.compile(re.escape(str(root)) + r"(?=/|\b)"), ".")]
        if len(folder) > 1:
            self.replaced.append((re.compile(re.escape(folder) + r"(?=/|\b)"), "~"))
        for name, instead in ((host, "HOST"), (host.split(".")[0], "HOST"), (user, "USER")):
            if len(name) > 2 and name.lower() not in NAMES_OF_NOBODY:
                self.replaced.append((re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"), instead))
        self.replaced += [
            (re.compile(r"\b(GPU|MIG)-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"), r"\1-ID"),
            (re.compile(r"\b[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d\b"), "PCI-ADDRESS"),
            (re.compile(r"\b\d{1,3}(\.\d{1,3}){3}\b"), "ADDRESS"),
            (re.compile(r"\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b"), "ADDRESS"),
            (re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)+"), "ADDRESS"),
            # Keep the last part of an absolute path: it names a tool or a header.
            (re.compile(r"(?<![\w.~)\]])/(?:[\w.+@~-]+/)+([\w.+-]+)"), r"…/\1"),
        ]

    def __call__(self, value):
        if isinstance(value, dict):
            return {self(key): self(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self(inner) for inner in value]
        if not isinstance(value, str):
            return value
        for pattern, instead in self.replaced:
            value = pattern.sub(instead, value)
        return value


def new(facts, capability, begun):
    return {
        "schema": SCHEMA,
        "what": "acceptance of nvfp4-moe's CUDA backends",
        "capability": capability,
        "emulated": "emulated" in facts.get("gpu", {}),
        "begun": begun.strftime("%Y-%m-%d %H:%M UTC"),
        "machine": facts,
        "verdict": "",
        "steps": [],
    }


def read(path):
    """Reads the report from a file that write made."""
    _, mark, text = pathlib.Path(path).read_text().partition(MARK)
    if not mark:
        raise ValueError(f"{pathlib.Path(path).name}: expected a report with a line {MARK!r}")
    return json.loads(text)


def take_over(report, path):
    """Adds the ended steps of an earlier report of the same commit and device, or prints why it cannot resume."""
    try:
        earlier = read(path)
    except (OSError, ValueError) as error:
        print(f"acceptance: nothing to resume: {error}")
        return
    for field in ("capability", "machine"):
        if earlier.get(field) != report[field]:
            print(f"acceptance: nothing to resume: the report there is of another {field}")
            return
    report["begun"] = earlier["begun"]
    for entry in earlier["steps"]:
        if entry["state"] == "running":
            entry = {**entry, "state": "not run", "why": "the machine or the session ended during it"}
        put(report, {**entry, "kept": True})


def put(report, entry):
    """Adds a step's entry, or replaces the one of that name."""
    for index, other in enumerate(report["steps"]):
        if other["name"] == entry["name"]:
            report["steps"][index] = entry
            return
    report["steps"].append(entry)


def entry(report, name):
    return next((entry for entry in report["steps"] if entry["name"] == name), {})


def state(report, name):
    return entry(report, name).get("state", "not run")


def verdict(report, names):
    """Returns the overall result in one line."""
    by_state = {}
    for name in names:
        by_state.setdefault(state(report, name), []).append(name)
    passed = sum(entry.get("figures", {}).get("passed", 0) or 0 for entry in report["steps"])
    where = "on the emulator, which proves nothing of a chip" if report["emulated"] else "on this GPU"
    if planted := report["machine"].get("planted"):
        where += f", rehearsed with the planted fault {planted}"
    if by_state.get("failed"):
        return f"NOT ACCEPTED: failed {where}: {', '.join(by_state['failed'])}"
    left = by_state.get("not run", []) + by_state.get("running", [])
    left += [] if report["emulated"] else by_state.get("absent", [])
    if left:
        return f"INCOMPLETE: nothing failed {where}, and not run: {', '.join(left)}"
    return f"ACCEPTED: {len(by_state['passed'])} steps with {passed} tests passed {where}"


def write(report, path, names):
    """Writes the report at once: if the process stops in the middle, the earlier one remains."""
    report["verdict"] = verdict(report, names)
    path = pathlib.Path(path)
    beside = path.with_name(path.name + ".new")
    with open(beside, "w") as file:
        file.write(text_of(report) + f"\n{MARK}\n" + json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def table(rows):
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def text_of(report):
    """The readable head."""
    lines = [
        report["verdict"],
        "",
        f"{report['what']}, compute capability {report['capability']}, begun {report['begun']}",
    ]
    for name, value in report["machine"].items():
        value = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        lines.append(f"{name}: {value}")
    lines += ["", *table([("step", "state", "s", ""), *(step_row(entry) for entry in report["steps"])])]
    for entry in report["steps"]:
        lines += details(entry)
    return "\n".join(lines) + "\n"


def step_row(entry):
    figures = entry.get("figures", {})
    counts = ", ".join(
        f"{figures[key]} {key}" for key in ("passed", "failed", "skipped", "errors") if figures.get(key) is not None
    )
    return entry["name"], entry["state"], round(entry.get("seconds", 0)), entry.get("why") or counts


def rows_of_bench(cells):
    """Compares with an H200's times or, if configurations were forced, the configurations with each other."""
    if "configuration" not in cells[0]:
        rows = [("shape", "tokens", "format", "backend", "us", "H200 us", "H200 / this")]
        for cell in cells:
            h200 = cell["h200_us"]
            beside = (f"{h200:.1f}", f"{h200 / cell['us']:.2f}") if h200 else ("", "")
            rows.append((cell["shape"], cell["tokens"], cell["format"], cell["backend"], f"{cell['us']:.1f}", *beside))
        return rows
    configurations = sorted({cell["configuration"] for cell in cells})
    us = {(cell["shape"], cell["tokens"], cell["configuration"]): f"{cell['us']:.1f}" for cell in cells}
    of = dict.fromkeys((cell["shape"], cell["tokens"], cell["rows_per_expert"]) for cell in cells)
    rows = [("shape", "tokens", "rows an expert", *(f"configuration {c}, us" for c in configurations))]
    return rows + [(*key, *(us.get((*key[:2], c), "") for c in configurations)) for key in of]


def details(entry):
    figures = entry.get("figures", {})
    lines = acceptance_ladder.details(figures)
    for name in figures.get("failed_tests", []):
        lines.append(f"failed: {name}")
    for places, width in figures.get("bits_of_sums", {}).items():
        lines.append(f"sums {places}: {'at least ' if width['at_least'] else ''}{width['bits']} bits")
    probes = figures.get("probes", {})
    for scale in probes.get("scale_bytes", []):
        lines.append(f"a block scale of {scale['byte']} counts for {scale['counts_for']}")
    if kernels := probes.get("kernels"):
        lines += table([
            ("kernel", "threads", "registers", "local", "shared", "ctas an SM", "launch"),
            *((short_name(k["name"]), k["threads"], k["registers"], k["local_bytes"],
               k["static_shared_bytes"] + k["dynamic_shared_bytes"], k["ctas_per_multiprocessor"], k["launch"]) for k in kernels),
        ])  # fmt: skip
    if cells := figures.get("cells"):
        lines += table(rows_of_bench(cells))
    lines += figures.get("said", [])
    for name, detail in figures.get("self_test", {}).items():
        lines.append(f"self-test {name}: {detail}")
    if entry["state"] == "failed":
        lines += ["end of its output:", *("  " + line for line in entry.get("end_of_output", []))]
    return ["", f"[{entry['name']}]", *lines] if lines else []
