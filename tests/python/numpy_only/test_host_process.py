"""The module inside a process that forks, interrupts, ends in the middle of calls, and shares what must not be shared."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import nvfp4_moe as nv
import pytest
from layers import EXPERTS, HIDDEN, INTERMEDIATE, batch, layer, weights

HERE = os.path.dirname(__file__)


def in_child(body: Callable[[], bool]) -> int:
    """The status of a forked child: 0 if body holds there; SIGALRM's number where it hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            os._exit(0 if body() else 1)
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
            os._exit(2)
    return os.waitpid(child, 0)[1]


class Running:
    """Threads that run a layer for as long as the scope."""

    def __init__(self, one: nv.MoeLayer, count: int = 3) -> None:
        self.stop = False
        self.threads = [threading.Thread(target=self._work, args=(one, seed)) for seed in range(count)]

    def _work(self, one: nv.MoeLayer, seed: int) -> None:
        inputs = batch(16, seed)
        while not self.stop:
            one.run(*inputs)
            one.status()

    def __enter__(self) -> Running:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop = True
        for thread in self.threads:
            thread.join()


# ---- fork


@pytest.mark.attack("forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_runs_changes_and_opens_layers_whatever_the_parents_threads_do(monkeypatch, attacked):
    monkeypatch.setenv("NVFP4_MOE_THREADS", "3")
    one, inputs = layer(), batch(16)
    expected = one.run(*inputs)
    gate, up, down = (tuple(part[1] for part in weights()[name]) for name in ("gate", "up", "down"))

    def work() -> bool:
        right = np.array_equal(one.run(*inputs), expected)
        one.replace_expert(0, gate, up, down)  # Busy where the parent's runs counted
        changed = not np.array_equal(one.run(*inputs), expected)
        own = layer()
        threads = len(os.listdir("/proc/self/task"))
        right = right and np.array_equal(own.run(*inputs), expected) and own.status() == own.status()
        nv.release_workspaces()
        return right and changed and threads == 3 and np.array_equal(own.run(*inputs), expected)

    with Running(one):
        for _ in range(20):
            attacked()
            assert in_child(work) == 0
    assert np.array_equal(one.run(*inputs), expected)


shared_layer: nv.MoeLayer | None = None


def run_shared(seed: int) -> np.ndarray:
    assert shared_layer is not None
    return shared_layer.run(*batch(8, seed)) + layer().run(*batch(8, seed))


@pytest.mark.attack("forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_multiprocessings_workers_share_a_layer_by_fork(attacked):
    global shared_layer
    shared_layer = layer()
    try:
        expected = [run_shared(seed) for seed in range(6)]
        with Running(shared_layer), multiprocessing.get_context("fork").Pool(2) as pool:
            attacked(len(multiprocessing.active_children()))
            for a, b in zip(pool.map_async(run_shared, range(6)).get(timeout=60), expected, strict=True):
                assert np.array_equal(a, b)
    finally:
        shared_layer = None


# ---- programs of their own: signals, and the interpreter's end

PREAMBLE = f"""
import os, signal, sys, threading, time
sys.path.insert(0, {HERE!r})
import numpy as np, nvfp4_moe as nv
from layers import batch, layer
"""
# Calls work() and is interrupted after 0.3 s. Says how long that took to come out. What runs in a shell's background
# inherits that Ctrl-C is ignored, which Python then leaves so.
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
# One expert that all name: 1500 of them are quantized in some 30 s, and each takes 3 MiB once it is packed.
MANY = """
stack = {name: np.broadcast_to(np.ones((rows, cols), np.float32), (experts, rows, cols))
         for name, rows, cols in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner))}
cfg = nv.MoeConfig(experts, 1, hidden, inner)
"""


def program(text: str, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + text, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture
def interrupted_after(attacked) -> Callable[..., float]:
    """interrupted_after(program, argument...) -> seconds from Ctrl-C to its exception."""

    def run(text: str, *arguments: str) -> float:
        done = program(text + INTERRUPT, *arguments)
        attacked()
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() != "ended by itself", "not interrupted at all"
        return float(done.stdout)

    return run


@pytest.mark.attack("interrupts")
@pytest.mark.parametrize("progress", ["None", "lambda report: None"])
def test_ctrl_c_ends_opening_from_floats(progress, interrupted_after):
    text = f"experts, hidden, inner = 1500, 1024, 1024\n{MANY}"
    text += f"work = lambda: nv.MoeLayer.from_bf16(cfg, **stack, max_tokens=4, progress={progress})"
    assert interrupted_after(text) < 5


@pytest.mark.attack("interrupts")
def test_ctrl_c_ends_opening_from_tensors(interrupted_after):
    text = """
experts, hidden, inner = 4000, 1024, 1024
def matrix(rows, cols):
    return (np.broadcast_to(np.zeros((rows, cols // 2), np.uint8), (experts, rows, cols // 2)),
            np.broadcast_to(np.full((rows, cols // 16), 56, np.uint8), (experts, rows, cols // 16)), 1.0)
cfg = nv.MoeConfig(experts, 1, hidden, inner)
work = lambda: nv.MoeLayer.from_tensors(cfg, gate=matrix(inner, hidden), up=matrix(inner, hidden),
                                        down=matrix(hidden, inner), max_tokens=4)
"""
    assert interrupted_after(text) < 5


@pytest.mark.attack("interrupts")
def test_ctrl_c_ends_a_calibration(interrupted_after):
    text = f"""experts, hidden, inner, tokens = 4, 2048, 2048, 4096
{MANY}
os.environ["NVFP4_MOE_THREADS"] = "2"
layer = nv.MoeLayer.from_bf16(cfg, **stack, max_tokens=4)
x = np.ones((tokens, hidden), np.float32), np.arange(tokens).reshape(-1, 1) % experts, np.ones((tokens, 1), np.float32)
work = lambda: layer.calibrate(*x)
"""
    assert interrupted_after(text) < 5


@pytest.mark.attack("interrupts")
def test_ctrl_c_ends_quantize_checkpoint(tmp_path, interrupted_after):
    text = """
import json, pathlib, qwen3_moe as model
experts, hidden, inner = 96, 1024, 512
source, out = pathlib.Path(sys.argv[1]) / "in", pathlib.Path(sys.argv[1]) / "out"
source.mkdir()
config = model.CONFIG | dict(hidden_size=hidden, moe_intermediate_size=inner, num_experts=experts, num_hidden_layers=1)
(source / "config.json").write_text(json.dumps(config))
shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
ones = {name: np.full(shape, 0x3F80, np.uint16) for name, shape in shapes.items()}
header, end = {}, 0
for expert in range(experts):
    for name, one in ones.items():
        header[f"model.layers.0.mlp.experts.{expert}.{name}.weight"] = {
            "dtype": "BF16", "shape": one.shape, "data_offsets": [end, end + one.nbytes]}
        end += one.nbytes
text = json.dumps(header).encode()
with open(source / "model.safetensors", "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for _ in range(experts):
        for one in ones.values():
            file.write(one.tobytes())
work = lambda: nv.quantize_checkpoint(source, out, search="mse", threads=1)
"""
    assert interrupted_after(text, str(tmp_path)) < 5


@pytest.mark.attack("interrupts")
def test_a_signal_handler_that_returns_stops_nothing(attacked):
    done = program(
        """
received = []
signal.signal(signal.SIGALRM, lambda *_: received.append(1))
os.environ["NVFP4_MOE_THREADS"] = "1"
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
experts, hidden, inner = 150, 512, 512
"""
        + MANY
        + """
layer = nv.MoeLayer.from_bf16(cfg, **stack, max_tokens=4)
signal.setitimer(signal.ITIMER_REAL, 0)
print(len(received))
print(layer.run(np.ones((1, hidden), np.float32), np.zeros((1, 1), int), np.ones((1, 1), np.float32)).shape)
"""
    )
    assert done.returncode == 0, done.stderr
    received, shape = done.stdout.splitlines()
    assert int(received) > 1, "in the middle of the call, not only after it"
    assert shape == "(1, 512)"
    attacked(int(received))


LOOPS = {
    "run": "one = layer(); inputs = batch(16)\ndef work(): one.run(*inputs)",
    "run through the operators of formats": "x = np.ones((64, 64), np.float32)\ndef work(): nv.dequantize(*nv.quantize(x))",
    "open with progress": "def work(): layer(progress=lambda report: sum(range(200)))",
}


@pytest.mark.attack("interpreter exits")
@pytest.mark.parametrize("loop", LOOPS)
def test_daemon_threads_do_not_abort_the_process_at_its_end(loop, attacked):
    """20 ends, each with two daemon threads somewhere in a call."""
    text = (
        LOOPS[loop].replace("layer(progress=", "progress_layer(")
        + """
import layers
def progress_layer(progress):
    return nv.MoeLayer.from_tensors(layers.config(), **layers.weights(), max_tokens=4, progress=progress)
def loop():
    while True: work()
for _ in range(2): threading.Thread(target=loop, daemon=True).start()
time.sleep(float(sys.argv[1]))
"""
    )
    for attempt in range(20):
        done = program(text, str(0.02 + 0.003 * attempt))
        attacked()
        assert (done.returncode, done.stderr) == (0, ""), attempt


# ---- what must not be shared, and strides that lead nowhere


def test_two_runs_in_one_workspace_are_busy_or_right():
    one, inputs = layer(max_tokens=256), batch(256)
    expected = one.run(*inputs)
    space = np.zeros(one.workspace_bytes(256) + 256, np.uint8)
    space = space[-space.ctypes.data % 256 :][: one.workspace_bytes(256)]
    outcomes: list[str] = []

    def work() -> None:
        for _ in range(100):
            try:
                outcomes.append("right" if np.array_equal(one.run(*inputs, workspace=space), expected) else "wrong")
            except nv.Busy as error:
                assert "workspace: expected one that no other run is using, got one in use" in str(error)
                outcomes.append("busy")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "wrong" not in outcomes and "busy" in outcomes and "right" in outcomes


@pytest.mark.parametrize("name", ["codes", "scales"])
@pytest.mark.parametrize("strides", [(2**62, 1), (2**61, 2**61)])
def test_strides_that_overflow_are_an_error(name, strides):
    w = weights()
    part = ("codes", "scales").index(name)
    gate = list(w["gate"])
    gate[part] = np.lib.stride_tricks.as_strided(gate[part], strides=(*strides, 1))
    shape = rf"\({EXPERTS}|E, {INTERMEDIATE}, {HIDDEN // (2 if part == 0 else 16)}\)"
    with pytest.raises(ValueError, match=f"gate {name}: expected .*{shape}"):
        nv.MoeLayer.from_tensors(layer().config, **(w | {"gate": tuple(gate)}), max_tokens=4)


def test_tensor_scales_may_lie_anywhere_in_memory():
    w = weights()
    codes, scales, tensor_scales = w["gate"]
    apart = np.zeros(EXPERTS * 1000, np.float32)[::1000]
    apart[:] = tensor_scales
    crooked = np.zeros(4 * EXPERTS + 1, np.uint8)[1:].view(np.float32)
    crooked[:] = tensor_scales
    expected = layer().run(*batch(4))
    for given in (apart, tensor_scales[::-1].copy()[::-1], crooked):
        one = nv.MoeLayer.from_tensors(layer().config, **(w | {"gate": (codes, scales, given)}), max_tokens=4)
        assert np.array_equal(one.run(*batch(4)), expected)
    overflow = np.lib.stride_tricks.as_strided(tensor_scales, strides=(2**62,))
    with pytest.raises(ValueError, match="gate tensor_scale: expected"):
        nv.MoeLayer.from_tensors(layer().config, **(w | {"gate": (codes, scales, overflow)}), max_tokens=4)
