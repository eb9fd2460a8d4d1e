"""Threads that load, run, replace and unpack layers on a GPU while graphs of other layers are captured and replayed.

This is an engine's load over weeks, in NVFP4_MOE_SOAK_SECONDS (5). Every output is compared bit for bit with the right
ones, and afterwards all memory is back. Needs torch with CUDA, a GPU, and a build with the CUDA backends.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import os
import random
import threading

import numpy as np
import nvfp4_moe as nv
from gpu import assert_comes_back, captured, layers, needs_gpu, on_gpu, torch

pytestmark = needs_gpu

SECONDS = float(os.environ.get("NVFP4_MOE_SOAK_SECONDS", "5"))
THREADS = 4
SLOTS = 5
GRAPHS = 6  # that a thread keeps
TOKENS = (0, 1, 7, 32)
BACKENDS = ("auto", "cuda")
SEEDS = (0, 1, 2)
# A thread's next action, and its frequency.
ACTIONS = {
    "run_layer": 30, "replay": 30, "capture": 4, "replace": 12, "replace_own": 8, "unpack": 6, "load": 4,
    "load_own": 2, "release": 2, "fork": 1,
}  # fmt: skip
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 2, 256, 128


def weights(seed: int) -> dict[str, tuple[np.ndarray, ...]]:
    return layers.weights(seed, EXPERTS, HIDDEN, INTERMEDIATE)


def batch(tokens: int) -> list[torch.Tensor]:
    """hidden (T, HIDDEN) bfloat16, ids (T, TOP_K) int32 that all choose expert 0, router weights (T, TOP_K) float32."""
    draw = np.random.default_rng(tokens)
    ids = draw.integers(1, EXPERTS, (tokens, TOP_K), dtype=np.int32)
    ids[:, 0] = 0
    hidden = draw.standard_normal((tokens, HIDDEN), dtype=np.float32)
    hidden, ids, router_weights = on_gpu((hidden, ids, draw.random((tokens, TOP_K), dtype=np.float32)))
    return [hidden.bfloat16(), ids, router_weights]


class Soak:
    """Shared layers in slots, their right outputs, and one lock. A thread holds it to capture a graph, or to make the
    whole device wait, which would end another thread's capture."""

    def __init__(self) -> None:
        self.weights = {seed: weights(seed) for seed in SEEDS}
        # Expert 0 of either version, as replace_expert takes it; a layer of any seed gets the same two.
        self.versions = [layers.expert_of(weights(seed), 0) for seed in (10, 11)]
        self.batches = {tokens: batch(tokens) for tokens in TOKENS}
        self.right = {}  # (backend, seed, tokens): an output for each version
        for backend in BACKENDS:
            for seed in SEEDS:
                layer = self.open(backend, seed)
                for version in self.versions:
                    layer.replace_expert(0, **version)
                    for tokens in TOKENS:
                        out = layer.run(*self.batches[tokens]).clone()
                        self.right.setdefault((backend, seed, tokens), []).append(out)
        torch.cuda.synchronize()
        self.device_waits = threading.Lock()
        self.slots = [(BACKENDS[i % 2], SEEDS[i % 3]) for i in range(SLOTS)]
        self.slots = [(backend, seed, self.open(backend, seed)) for backend, seed in self.slots]
        self.counts = collections.Counter()
        self.wrong = []
        self.stop = threading.Event()

    def open(self, backend: str, seed: int) -> nv.MoeLayer:
        config = nv.MoeConfig(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE)
        layer = nv.MoeLayer.from_tensors(
            config, **self.weights[seed], max_tokens=max(TOKENS), device="cuda:0", backend=backend
        )
        layer.replace_expert(0, **self.versions[0])
        return layer


@dataclasses.dataclass
class Own:
    """A layer of one thread's graphs, and the version of expert 0 that it has."""

    backend: str
    seed: int
    layer: nv.MoeLayer
    version: int = 0


class Actor(threading.Thread):
    def __init__(self, soak: Soak, index: int) -> None:
        super().__init__(name=f"soak {index}", daemon=True)
        self.soak, self.random = soak, random.Random(index)
        self.stream = torch.cuda.Stream()
        self.doing = "nothing"
        self.error = None
        self.own = []  # layers of this thread's graphs, which only it replaces
        self.graphs = collections.deque(maxlen=GRAPHS)  # (the output of either version, out, graph, own)

    def run(self) -> None:
        try:
            with torch.cuda.stream(self.stream):
                while not self.soak.stop.is_set():
                    (self.doing,) = self.random.choices(list(ACTIONS), list(ACTIONS.values()))
                    self.soak.counts[self.doing] += self.has_done(getattr(self, self.doing))
        except BaseException as error:
            self.error = error
            self.soak.stop.set()

    def has_done(self, action) -> bool:
        """Returns whether the action had a layer to act on, which no other thread was using."""
        try:
            return action() is not False
        except nv.Busy:
            if self.doing not in ("run_layer", "replace", "unpack"):  # these use layers that only this thread has
                raise
            self.soak.counts["busy"] += 1
            return False

    def pick(self):
        return self.random.choice(self.soak.slots)

    def judge(self, out: torch.Tensor, right: list[torch.Tensor]) -> None:
        if not any(torch.equal(out, one) for one in right):
            self.soak.wrong.append((self.doing, out.clone()))

    def run_layer(self):
        backend, seed, layer = self.pick()
        tokens = self.random.choice(TOKENS)
        out = layer.run(*self.soak.batches[tokens])
        self.stream.synchronize()
        self.judge(out, self.soak.right[backend, seed, tokens])

    def replace(self):
        _, _, layer = self.pick()
        with self.soak.device_waits:
            layer.replace_expert(0, **self.random.choice(self.soak.versions))

    def unpack(self):
        _, _, layer = self.pick()
        with self.soak.device_waits:
            expert = layer.expert(0)

        def is_of(version: dict[str, tuple[np.ndarray, ...]]) -> bool:
            return all(
                np.array_equal(expert[name]["codes"], codes)
                and np.array_equal(expert[name]["scales"], scales)
                and expert[name]["tensor_scale"] == tensor_scale
                for name, (codes, scales, tensor_scale) in version.items()
            )

        if not any(map(is_of, self.soak.versions)):
            self.soak.wrong.append(("unpack", expert))

    def load(self):
        at, backend, seed = self.random.randrange(SLOTS), self.random.choice(BACKENDS), self.random.choice(SEEDS)
        with self.soak.device_waits:
            self.soak.slots[at] = (backend, seed, self.soak.open(backend, seed))

    def load_own(self):
        backend, seed = self.random.choice(BACKENDS), self.random.choice(SEEDS)
        with self.soak.device_waits:
            self.own = [*self.own[-1:], Own(backend, seed, self.soak.open(backend, seed))]

    def replace_own(self):
        """In the order of the stream that replays, without the lock. The next replay uses the new weights."""
        if not self.own:
            return False
        own = self.random.choice(self.own)
        own.version = self.random.randrange(2)
        own.layer.replace_expert(0, **self.soak.versions[own.version], stream=self.stream)

    def capture(self):
        if not self.own:
            return False
        own = self.random.choice(self.own)
        tokens = self.random.choice(TOKENS[1:])
        with self.soak.device_waits:
            self.stream.synchronize()
            run = functools.partial(own.layer.run, *self.soak.batches[tokens])
            graph, out = captured(run, stream=self.stream, capture_error_mode="thread_local")
        self.graphs.append((self.soak.right[own.backend, own.seed, tokens], out, graph, own))

    def replay(self):
        if not self.graphs:
            return False
        right, out, graph, own = self.random.choice(self.graphs)
        out.zero_()
        graph.replay()
        self.stream.synchronize()
        self.judge(out, [right[own.version]])

    def release(self):
        with self.soak.device_waits:
            nv.release_workspaces()

    def fork(self):
        _, _, layer = self.pick()
        with self.soak.device_waits:
            child = os.fork()
            if child == 0:  # CUDA does not work in a forked child, and the library reports that
                try:
                    layer.expert(0)
                except nv.Unsupported:
                    os._exit(0)
                os._exit(1)
            if os.waitpid(child, 0)[1] != 0:
                self.soak.wrong.append(("fork", child))


def soaked(seconds: float) -> collections.Counter[str]:
    """Runs THREADS threads for that time and counts each action. Fails if one was wrong, raised or hangs."""
    soak = Soak()
    actors = [Actor(soak, index) for index in range(THREADS)]
    for actor in actors:
        actor.start()
    soak.stop.wait(seconds)
    soak.stop.set()
    for actor in actors:
        actor.join(60)
        assert not actor.is_alive(), f"{actor.name} hangs in {actor.doing}"
        if actor.error is not None:
            raise actor.error
    assert not soak.wrong, [what for what, _ in soak.wrong]
    return soak.counts


def free_bytes() -> int:
    """The GPU's free bytes, once this process has given back its unused memory."""
    gc.collect()
    torch.cuda.synchronize()
    nv.release_workspaces()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_threads_on_shared_layers_beside_graphs_of_others() -> None:
    soaked(1)  # CUDA loads a kernel at its first use, and keeps it
    before = free_bytes()
    counts = soaked(SECONDS)
    print(f"{SECONDS:.0f} s, {THREADS} threads: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    assert all(counts[action] > 0 for action in ACTIONS), counts
    assert_comes_back(before, free_bytes, 10)
