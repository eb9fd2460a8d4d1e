"""The module in a process that forks, is interrupted, ends during calls, and shares objects that must not be shared."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import nvfp4_moe as nv
import pytest
from layers import aligned, batch, expert_of, layer, on_threads, weights

HERE = os.path.dirname(__file__)


def in_child(body: Callable[[], bool]) -> int:
    """Returns the status of a forked child: 0 if body is true there; SIGALRM's number if it hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            os._exit(0 if body() else 1)
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
            os._exit(2)
    return os.waitpid(child, 0)[1]


@contextlib.contextmanager
def running(one: nv.MoeLayer) -> Iterator[None]:
    """Three threads run a layer inside the scope."""
    stop = threading.Event()

    def work(seed: int) -> None:
        inputs = batch(16, seed)
        while not stop.is_set():
            one.run(*inputs)
            one.status()

    threads = threading.Thread(target=on_threads, args=(3, work))
    threads.start()
    try:
        yield
    finally:
        stop.set()
        threads.join()


# ---- fork


def forks(test: Callable) -> Callable:
    ignored = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    return pytest.mark.attack("forks")(ignored(test))


@forks
def test_a_forked_child_runs_changes_and_opens_layers_whatever_the_parents_threads_do(monkeypatch, attacked):
    monkeypatch.setenv("NVFP4_MOE_THREADS", "3")
    gc.collect()  # layers of earlier tests in reference cycles would keep their pool
    one, inputs = layer(), batch(16)
    expected = one.run(*inputs)

    def work() -> bool:
        right = np.array_equal(one.run(*inputs), expected)
        one.replace_expert(0, **expert_of(weights(), 1))  # would be Busy if it counted the parent's runs
        changed = not np.array_equal(one.run(*inputs), expected)
        own = layer()
        threads = len(os.listdir("/proc/self/task"))
        right = right and np.array_equal(own.run(*inputs), expected) and own.status() == own.status()
        nv.release_workspaces()
        return right and changed and threads == 3 and np.array_equal(own.run(*inputs), expected)

    with running(one):
        for _ in range(20):
            attacked()
            assert in_child(work) == 0
    assert np.array_equal(one.run(*inputs), expected)


shared_layer: nv.MoeLayer | None = None


def run_shared(seed: int) -> np.ndarray:
    return shared_layer.run(*batch(8, seed)) + layer().run(*batch(8, seed))


@forks
def test_multiprocessings_workers_share_a_layer_by_fork(attacked, monkeypatch):
    monkeypatch.setitem(globals(), "shared_layer", layer())
    expected = [run_shared(seed) for seed in range(6)]
    with running(shared_layer), multiprocessing.get_context("fork").Pool(2) as pool:
        attacked(len(multiprocessing.active_children()))
        for a, b in zip(pool.map_async(run_shared, range(6)).get(timeout=60), expected, strict=True):
            assert np.array_equal(a, b)


# ---- programs of their own: signals, and the interpreter's end

PREAMBLE = f"""
import os, signal, sys, threading, time
sys.path.insert(0, {HERE!r})
import numpy as np, nvfp4_moe as nv
from layers import batch, layer
"""
# Calls work(), interrupts it after 0.3 s and prints how long it took to stop. A background process of a shell inherits
# that Ctrl-C is ignored, and Python then keeps that, so the handler is set here.
INTERRUPT = """
signal.signal(signal.SIGINT, signal.default_int_handler)
def interrupt():
    global sent
    time.sleep(0.3)
    sent = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
try:
    work()
    print("ended by itself")
except KeyboardInterrupt:
    print(time.monotonic() - sent)
"""
# One expert, repeated: quantizing 1500 of them takes some 30 s, and each takes 3 MiB once it is packed.
MANY = """
stack = {name: np.broadcast_to(np.ones((rows, cols), np.float32), (experts, rows, cols))
         for name, rows, cols in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner))}
cfg = nv.MoeConfig(experts, 1, hidden, inner)
"""


def program(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PREAMBLE + text, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


# Definitions of work, by the call that Ctrl-C has to end.
CALLS = {
    "opening from floats, with progress": f"""
experts, hidden, inner = 1500, 1024, 1024
{MANY}
work = lambda: nv.MoeLayer.from_bf16(cfg, **stack, max_tokens=4, progress=lambda report: None)
""",
    "opening from tensors": """
experts, hidden, inner = 4000, 1024, 1024
def matrix(rows, cols):
    return (np.broadcast_to(np.zeros((rows, cols // 2), np.uint8), (experts, rows, cols // 2)),
            np.broadcast_to(np.full((rows, cols // 16), 56, np.uint8), (experts, rows, cols // 16)), 1.0)
cfg = nv.MoeConfig(experts, 1, hidden, inner)
work = lambda: nv.MoeLayer.from_tensors(cfg, gate=matrix(inner, hidden), up=matrix(inner, hidden),
                                        down=matrix(hidden, inner), max_tokens=4)
""",
    "a calibration": f"""
experts, hidden, inner, tokens = 4, 2048, 2048, 4096
{MANY}
os.environ["NVFP4_MOE_THREADS"] = "2"
layer = nv.MoeLayer.from_bf16(cfg, **stack, max_tokens=4)
x = np.ones((tokens, hidden), np.float32), np.arange(tokens).reshape(-1, 1) % experts, np.ones((tokens, 1), np.float32)
work = lambda: layer.calibrate(*x)
""",
    "quantize_checkpoint": """
import json, pathlib, qwen3_moe as model
source, out = pathlib.Path(sys.argv[1]) / "in", pathlib.Path(sys.argv[1]) / "out"
source.mkdir()
config = model.CONFIG | dict(hidden_size=1024, moe_intermediate_size=512, num_experts=96, num_hidden_layers=1)
(source / "config.json").write_text(json.dumps(config))
one = {name: np.full(shape, 0x3F80, np.uint16)
       for name, shape in (("gate_proj", (512, 1024)), ("up_proj", (512, 1024)), ("down_proj", (1024, 512)))}
model.write_safetensors(source / "model.safetensors", {
    f"model.layers.0.mlp.experts.{expert}.{name}.weight": array for expert in range(96) for name, array in one.items()})
work = lambda: nv.quantize_checkpoint(source, out, search="mse", threads=1)
""",
}


@pytest.mark.attack("interrupts")
@pytest.mark.parametrize("call", CALLS)
def test_ctrl_c_ends(call, tmp_path, attacked):
    done = program(CALLS[call] + INTERRUPT, str(tmp_path))
    attacked()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() != "ended by itself", "not interrupted at all"
    assert float(done.stdout) < 5


@pytest.mark.attack("interrupts")
def test_a_signal_handler_that_returns_stops_nothing(attacked):
    done = program(
        f"""
received = []
signal.signal(signal.SIGALRM, lambda *_: received.append(1))
os.environ["NVFP4_MOE_THREADS"] = "1"
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
experts, hidden, inner = 150, 512, 512
{MANY}
layer = nv.MoeLayer.from_bf16(cfg, **stack, max_tokens=4)
signal.setitimer(signal.ITIMER_REAL, 0)
print(len(received), layer.expert_count)
"""
    )
    assert done.returncode == 0, done.stderr
    received, experts = map(int, done.stdout.split())
    assert received > 1, "in the middle of the call, not only after it"
    assert experts == 150
    attacked(received)


LOOPS = {
    "run": "one = layer(); inputs = batch(16)\ndef work(): one.run(*inputs)",
    "open with progress": """
import layers
def work():
    nv.MoeLayer.from_tensors(layers.config(), **layers.weights(), max_tokens=4, progress=lambda report: sum(range(200)))
""",
}


@pytest.mark.attack("interpreter exits")
@pytest.mark.parametrize("loop", LOOPS)
def test_daemon_threads_do_not_abort_the_process_at_its_end(loop, attacked):
    """20 interpreter exits, each with two daemon threads somewhere in a call."""
    text = f"""{LOOPS[loop]}
def loop():
    while True: work()
for _ in range(2): threading.Thread(target=loop, daemon=True).start()
time.sleep(float(sys.argv[1]))
"""
    for attempt in range(20):
        done = program(text, str(0.02 + 0.003 * attempt))
        attacked()
        assert (done.returncode, done.stderr) == (0, ""), attempt


# ---- objects that must not be shared


def test_two_runs_in_one_workspace_are_busy_or_right():
    one, inputs = layer(max_tokens=256), batch(256)
    expected = one.run(*inputs)
    space = aligned(one.workspace_bytes(256))
    space[:] = 0
    outcomes: list[str] = []

    def work(_: int) -> None:
        for _ in range(100):
            try:
                outcomes.append("right" if np.array_equal(one.run(*inputs, workspace=space), expected) else "wrong")
            except nv.Busy as error:
                assert "workspace: expected one that no other run is using, got one in use" in str(error)
                outcomes.append("busy")

    on_threads(4, work)
    assert "wrong" not in outcomes and "busy" in outcomes and "right" in outcomes
