#!/usr/bin/env python3
"""Runs the acceptance of the CUDA backends on this machine's GPU and writes one report to send back.

    ./dev gpu --acceptance [--resume] [--part PART] [--skip STEP,...] [--only STEP,...] [--minutes N] [--out FILE]
    ./dev gpu --acceptance --only ladder --plant hang       rehearses with a planted fault
    ./dev gpu --acceptance --emulate 12.0       rehearses a short list of tests on the emulator
                                                (docs/contribute/emulator.md)

Each step has a time limit. A failed step stops only those that depend on it. The report is rewritten before and after
every step, so it survives if the machine stops; --resume continues from there. Exit code: 0 accepted, 1 not accepted,
2 cannot begin, 3 incomplete. docs/contribute/acceptance.md describes the steps.
"""

import argparse
import datetime
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import acceptance_ladder as ladder
import acceptance_report as report_file
from acceptance_report import Scrubber
from acceptance_results import backend_of, cannot_begin, end_in_words
from acceptance_steps import SANITIZED, chosen_device, steps_of  # noqa: F401 (SANITIZED: for ./dev gpu)

ROOT = pathlib.Path(__file__).resolve().parents[2]
KILLED_AFTER_S = 20  # a process that a GPU holds may never end; it is not waited for
TAIL_LINES = 60

PARTS = ("ladder", "tests", "sanitizers")  # each takes less than ten minutes on 16 cores
MINUTES = 15  # of steps other than builds: later ones wait for --resume
BUILDS = ("build-ladder", "build")


def names_in(text, steps):
    """The steps that --only or --skip names: "ladder" means all of the ladder's."""
    names = [name for name in text.split(",") if name]
    of_ladder = [step.name for step in steps if step.part == "ladder"]
    return [name for given in names for name in (of_ladder if given == "ladder" else [given])]


def failed_below(step, steps, report):
    """Returns the failed step that this one depends on, directly or not, or ""."""
    for name in step.needs:
        if report_file.state(report, name) == "failed":
            return name
        below = next((one for one in steps if one.name == name), None)
        if below and (found := failed_below(below, steps, report)):
            return found
    return ""


def left_out(step, steps, options, report):
    """Returns why the options, a failed step or the time exclude this one, or "" if it runs."""
    parts = (step.part,) if step.part else ("tests", "sanitizers")  # which begin with the same build
    if options.part and options.part not in parts:
        return f"not of the part {options.part}"
    if options.only and step.name not in names_in(options.only, steps):
        return "left out by --only"
    if step.name in names_in(options.skip, steps):
        return "left out by --skip"
    if step.absent:
        return ""
    if failed := failed_below(step, steps, report):
        return f"{failed} failed"
    if step.name not in BUILDS and not options.emulate and spent_s(report) >= options.minutes * 60:
        return f"{options.minutes} minutes are over: --resume goes on"
    return ""


def spent_s(report):
    """Seconds of the steps that this call has run, builds not counted."""
    ran = (entry for entry in report["steps"] if entry["name"] not in BUILDS and not entry.get("kept"))
    return sum(entry.get("seconds", 0) for entry in ran)


def end_group(process):
    """Ends a command and what it started. False if the system cannot."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return True
        try:
            process.wait(KILLED_AFTER_S)
            return True
        except subprocess.TimeoutExpired:
            continue
    return False


def run_command(command, environment, log, limit_s):
    """Returns (exit code, or "time limit", "missing", "cannot be ended"), and the output."""
    with open(log, "ab+") as out:
        start = out.seek(0, os.SEEK_END)
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                # A user's own settings of the library, for example a backend, are not part of the acceptance.
                env={**{k: v for k, v in os.environ.items() if not k.startswith("NVFP4_MOE_")}, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return "missing", str(error)
        try:
            code = process.wait(max(1, limit_s))
        except subprocess.TimeoutExpired:
            code = "time limit" if end_group(process) else "cannot be ended"
        except KeyboardInterrupt:
            end_group(process)
            raise
        out.seek(start)
        return code, out.read().decode(errors="replace")


def run_step(step, folder):
    """Makes the step's entry of the report. Its texts are not scrubbed yet."""
    log = folder / f"{step.name}.log"
    log.unlink(missing_ok=True)
    start, text, bad, code = time.monotonic(), "", "", 0
    for command in step.commands:
        code, printed = run_command(command, step.environment, log, step.limit_s - (time.monotonic() - start))
        text += printed
        if code != 0:
            bad = f"{pathlib.Path(command[0]).name}: {end_in_words(code, step.limit_s, printed)}"
            break
    try:
        figures, wrong = step.read(text)
    except Exception as error:  # the later steps run even if a tool printed something unexpected
        figures, wrong = {}, f"its output is not understood: {error!r}"
    entry = {
        "name": step.name,
        "state": "failed" if bad or wrong else "passed",
        "seconds": round(time.monotonic() - start, 1),
        "why": "; ".join(filter(None, (bad, wrong))),
        "figures": figures,
    }
    if entry["state"] == "failed":
        entry["end_of_output"] = text.splitlines()[-TAIL_LINES:]
    return entry


def bisection(step, report, options):
    """Runs a failed layer of the ladder in other configurations, four processes at a time."""
    own = step.commands[0]
    program = own[: own.index("--layer")]

    def run(arguments):
        log = options.out.parent / f"bisect-{'-'.join(arguments[1:])}.log"
        log.unlink(missing_ok=True)
        code, text = run_command(program + arguments, step.environment, log, step.limit_s)
        return "" if code == 0 else end_in_words(code, step.limit_s, text), text

    limit_s = step.limit_s if options.emulate else ladder.BISECTION_S
    return ladder.bisect(run, ladder.configurations_in(report), limit_s)


def lines_of(*command):
    """Returns the lines that a command prints, or an empty list if it fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def machine_facts(emulate):
    """Returns facts about the machine and the tree, without names and addresses."""
    asked = "name,compute_cap,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.memory"
    query = [
        "nvidia-smi",
        f"--query-gpu={asked}",
        "--format=csv,noheader",
        "-i",
        chosen_device()["CUDA_VISIBLE_DEVICES"],
    ]
    gpu = dict(zip(asked.split(","), re.split(r",\s*", "".join(lines_of(*query)[-1:])), strict=False))
    cpus = pathlib.Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*:\s*(.*)", cpus.read_text() if cpus.exists() else "")
    return {
        "gpu": {"emulated": emulate} if emulate else gpu if gpu["name"] else {},
        "gpus": 0 if emulate else len(lines_of("nvidia-smi", "-L")),
        "nvcc": "".join(lines_of("nvcc", "--version")[-1:]),
        "compiler": "".join(lines_of("c++", "--version")[:1]),
        "kernel": os.uname().release,
        "cpu": cpu.group(1) if cpu else "",
        "cpus": os.cpu_count(),
        "commit": "".join(lines_of("git", "rev-parse", "HEAD")),
        "changed_files": len(lines_of("git", "status", "--porcelain", "-uno")),
    }


def print_plan(steps, options, path):
    print(
        f"Acceptance on {'the emulator as ' + options.emulate if options.emulate else 'the first GPU'}: "
        f"{len(steps)} steps."
    )
    for step in steps:
        print(f"  {step.name:<20} {step.shows}" + (f" (left out: {step.absent})" if step.absent else ""))
    print(f"After the builds, steps begin for {options.minutes} minutes; --resume runs those that are left.")
    print("What is built and logged stays under build/.")
    print(f"The report, {path}, is plain text. It names the GPU, its driver, the CPU, compilers, the commit, tests and")
    print("their results, and figures; of steps that fail the end of their output. Host and user names, paths and")
    print("addresses are taken out. Nothing is sent anywhere: read it, and attach it to an issue.", flush=True)


def parse(arguments):
    parser = argparse.ArgumentParser(prog="./dev gpu --acceptance")
    parser.add_argument("--emulate", choices=["8.0", "9.0", "10.0", "12.0"], help="rehearse on the emulator")
    parser.add_argument("--resume", action="store_true", help="keep the steps that have ended")
    parser.add_argument("--part", default="", choices=PARTS, help="leave out the steps of the other part")
    parser.add_argument("--only", default="", help="names of steps, with commas between")
    parser.add_argument("--skip", default="", help="names of steps, with commas between")
    parser.add_argument("--minutes", type=int, default=MINUTES, help="for which steps begin, builds not counted")
    parser.add_argument(
        "--plant",
        default="",
        help="hang or descriptor: a fault for the ladder to find; @640: in kernels of 640 threads",
    )
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/acceptance/report.txt")
    parser.add_argument("--jobs", type=int, default=0, help="of the build; one a core")
    parser.add_argument("--library-only", action="store_true", help="without the command line, and so without doctor")
    return parser.parse_args(arguments)


def on_path(name):
    return any(os.access(os.path.join(folder, name), os.X_OK) for folder in os.environ["PATH"].split(os.pathsep))


def main(arguments=None):
    options = parse(arguments)
    facts = machine_facts(options.emulate)
    if options.plant:
        facts["planted"] = options.plant
    capability = options.emulate or facts["gpu"].get("compute_cap", "")
    if problem := cannot_begin(facts["nvcc"] if on_path("nvcc") else "", capability):
        print(f"acceptance: {problem}", file=sys.stderr)
        return 2
    tools = {"compute-sanitizer": on_path("compute-sanitizer"), "backend": backend_of(capability)}
    steps = steps_of(options, tools, capability)
    names = [step.name for step in steps]
    for name in names_in(options.only + "," + options.skip, steps):
        if name not in names:
            print(f"acceptance: no step {name}; there are {', '.join(names)}", file=sys.stderr)
            return 2
    options.out.parent.mkdir(parents=True, exist_ok=True)
    scrub = Scrubber(ROOT)
    report = report_file.new(scrub(facts), capability, datetime.datetime.now(datetime.UTC))
    if options.resume:
        report_file.take_over(report, options.out)
    print_plan(steps, options, os.path.relpath(options.out))
    bisected = None
    for step in steps:
        ended = options.resume and report_file.state(report, step.name) in ("passed", "failed")
        if ended and not (options.part and step.name == "build"):
            print(f"== {step.name}: kept, {report_file.state(report, step.name)}", flush=True)
        elif why := left_out(step, steps, options, report):
            report_file.put(report, {"name": step.name, "state": "not run", "why": why})
        elif step.absent:
            report_file.put(report, {"name": step.name, "state": "absent", "why": step.absent})
        else:
            print(f"== {step.name} (at most {step.limit_s} s)", flush=True)
            report_file.put(report, {"name": step.name, "state": "running", "why": "did not end"})
            report_file.write(report, options.out, names)
            entry = run_step(step, options.out.parent)
            if step.bisected and entry["state"] == "failed" and not bisected:
                print(f"   {entry['why']}\n   bisecting by configuration (at most {ladder.BISECTION_S} s)", flush=True)
                bisected = entry["figures"]["bisection"] = bisection(step, report, options)
            entry = scrub(entry)
            report_file.put(report, entry)
            print(
                f"   {entry['state']}, {entry['seconds']:.0f} s{': ' if entry['why'] else ''}{entry['why']}", flush=True
            )
        report_file.write(report, options.out, names)
    print(f"{report['verdict']}\nThe report: {os.path.relpath(options.out)}")
    return {"ACCEPTED": 0, "NOT ACCEPTED": 1}.get(report["verdict"].split(":")[0], 3)


if __name__ == "__main__":
    sys.exit(main())
