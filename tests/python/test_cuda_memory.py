"""Torch memory of layers on a GPU: workspaces sized for the run, graphs that share one, and all of it freed.

An engine's stack: hidden 7168, intermediate 2048, top-8, few experts. Needs torch with CUDA, a GPU with some room, and
a build with the CUDA backends: skipped by name elsewhere.

Long because that stack, made once, serves all tests.
"""

from __future__ import annotations

import gc
import subprocess
import sys

import gpu
import numpy as np
import nvfp4_moe as nv
import pytest
from gpu import captured, torch, why_not

EXPERTS, TOP_K, HIDDEN, INTER, MAX_TOKENS, LAYERS = 8, 8, 7168, 2048, 8192, 2
SIZES = [1, 2, 4, *range(16, 513, 16)]  # 35 sizes, as engines capture them
BLOCK = 512  # what torch's allocator rounds a tensor to
SEGMENT = 20 << 20  # it asks the driver for this many bytes if a tensor takes less than 10 MiB

NEEDED = 8 << 30


def reason() -> str:
    if why_not():
        return why_not()
    free = torch.cuda.mem_get_info()[0]
    return "" if free >= NEEDED else f"the tests take up to {NEEDED} bytes, the GPU has {free} free"


pytestmark = pytest.mark.skipif(reason() != "", reason=reason())


@pytest.fixture(scope="module")
def stack() -> list[nv.MoeLayer]:
    config = nv.MoeConfig(EXPERTS, TOP_K, HIDDEN, INTER)
    weights = (gpu.stacks(seed, EXPERTS, HIDDEN, INTER) for seed in range(LAYERS))
    return [nv.MoeLayer.from_tensors(config, **w, device="cuda:0", max_tokens=MAX_TOKENS) for w in weights]


class Inputs:
    """A batch of the largest captured size in graphs' memory. Smaller batches are its first tokens."""

    def __init__(self, tokens: int = SIZES[-1], seed: int = 0) -> None:
        self.random = torch.Generator("cuda").manual_seed(seed)
        self.hidden = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.ids = torch.empty(tokens, TOP_K, dtype=torch.int32, device="cuda")
        self.router = torch.empty(tokens, TOP_K, device="cuda")
        self.between = torch.empty_like(self.hidden)
        self.out = torch.empty_like(self.hidden)
        self.draw()

    def draw(self) -> None:
        self.hidden.normal_(generator=self.random)
        wanted = torch.rand(len(self.ids), EXPERTS, device="cuda", generator=self.random)
        self.ids.copy_(wanted.topk(TOP_K).indices)
        self.router.uniform_(generator=self.random)

    def of(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.hidden[:tokens], self.ids[:tokens], self.router[:tokens]


def forward(stack: list[nv.MoeLayer], inputs: Inputs, tokens: int) -> torch.Tensor:
    """Runs the stack; the last layer's output is in inputs.out. Only workspaces are allocated."""
    hidden, ids, router = inputs.of(tokens)
    for i, layer in enumerate(stack):
        out = (inputs.out if i + 1 == len(stack) else inputs.between)[:tokens]
        hidden = layer.run(hidden, ids, router, out=out)
    return hidden


def capture(stack: list[nv.MoeLayer], inputs: Inputs, tokens: int, pool=None) -> torch.cuda.CUDAGraph:
    return captured(lambda: forward(stack, inputs, tokens), pool=pool)[0]


def replays_give(run, inputs: Inputs, expected: torch.Tensor) -> None:
    """Checks that a graph of run, which writes inputs.out, gives the expected values. The graph is freed on return."""
    graph, _ = captured(run)
    inputs.out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(inputs.out[: len(expected)], expected)


def settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    nv.release_workspaces()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def first_graph() -> torch.cuda.CUDAGraph:
    """A graph that lives as long as all others: torch allocates some bytes for the first one."""
    counter = torch.zeros(1, device="cuda")
    return captured(lambda: counter.add_(1))[0]


@pytest.fixture(autouse=True)
def nothing_kept(first_graph: torch.cuda.CUDAGraph):
    settle()
    yield
    settle()


reserved, allocated = torch.cuda.memory_reserved, torch.cuda.memory_allocated


def rounded(size: int, to: int) -> int:
    return (size + to - 1) // to * to


# ---- graphs


def test_35_captured_sizes_cost_what_the_largest_does(stack: list[nv.MoeLayer], record_property) -> None:
    """On one pool, the largest first. Then all of them are replayed in turn with other contents."""
    inputs = Inputs()
    settle()
    largest = max(layer.workspace_bytes(SIZES[-1]) for layer in stack)
    before, before_allocated = reserved(), allocated()
    pool, graphs = torch.cuda.graph_pool_handle(), {}
    for tokens in reversed(SIZES):
        graphs[tokens] = capture(stack, inputs, tokens, pool)
    grown = reserved() - before
    record_property("largest_workspace_bytes", largest)
    record_property("reserved_bytes", grown)
    assert len(graphs) == 35 and largest <= grown <= 1.05 * largest, (grown, largest)
    assert allocated() == before_allocated  # every run gave its workspace back

    order = np.random.default_rng(3)
    for _ in range(3):
        for tokens in order.permutation(SIZES).tolist():
            inputs.draw()
            inputs.out.fill_(float("nan"))
            graphs[tokens].replay()
            replayed = inputs.out[:tokens].clone()
            assert torch.equal(replayed, forward(stack, inputs, tokens)), tokens
            assert replayed.isfinite().all() and replayed.abs().amax() > 0


def test_ten_captures_and_six_streams_take_what_their_tokens_need(stack: list[nv.MoeLayer], record_property) -> None:
    inputs = Inputs(1)
    others = [Inputs(1, seed) for seed in range(6)]
    settle()
    one = max(layer.workspace_bytes(1) for layer in stack)
    start = reserved()
    graphs = [capture(stack, inputs, 1) for _ in range(10)]  # a pool each
    for_graphs, before = reserved() - start, allocated()
    for stream, held in zip([torch.cuda.Stream() for _ in others], others, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward(stack, held, 1)
    torch.cuda.synchronize()
    for_streams = allocated() - before
    record_property("ten_captures_bytes", for_graphs)
    record_property("six_streams_bytes", for_streams)
    assert for_streams == 6 * rounded(one, BLOCK)
    # Even for a small graph the pool asks the driver for at least a segment.
    assert for_graphs <= 10 * max(rounded(one, 2 << 20), SEGMENT)
    assert for_graphs < stack[0].workspace_bytes() / 2, "as against one of the layer's largest"
    for graph in graphs:
        inputs.draw()
        graph.replay()
        replayed = inputs.out.clone()
        assert torch.equal(replayed, forward(stack, inputs, 1))


def test_all_memory_comes_back(stack: list[nv.MoeLayer], record_property) -> None:
    inputs = Inputs()

    def use() -> None:
        pool = torch.cuda.graph_pool_handle()
        graphs = [capture(stack, inputs, tokens, pool) for tokens in reversed(SIZES)]
        for stream in [torch.cuda.Stream() for _ in range(6)]:
            with torch.cuda.stream(stream):
                forward(stack, inputs, SIZES[-1])
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()

    def used() -> tuple[int, int, int]:
        free, total = torch.cuda.mem_get_info()
        return reserved(), allocated(), total - free

    use()  # once before, because the driver allocates memory with the first graph
    settle()
    before = used()
    use()
    settle()
    after = used()
    record_property("before_reserved_allocated_used", before)
    record_property("after_reserved_allocated_used", after)
    assert all(then <= 1.01 * now for then, now in zip(after, before, strict=True)), (before, after)
    graph = capture(stack, inputs, SIZES[-1])
    assert reserved() - after[0] >= stack[0].workspace_bytes(SIZES[-1])
    graph.reset()
    torch.cuda.empty_cache()
    assert reserved() == after[0]


def test_a_fork_in_a_capture_has_a_workspace_of_its_own(stack: list[nv.MoeLayer]) -> None:
    """Two layers run at the same time in one graph, each in a stream of the capture."""
    left, right = Inputs(64, 1), Inputs(64, 2)
    side = torch.cuda.Stream()

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        stack[0].run(*left.of(64), out=left.out)
        with torch.cuda.stream(side):
            stack[1].run(*right.of(64), out=right.out)
        torch.cuda.current_stream().wait_stream(side)

    graph, _ = captured(both)
    for _ in range(20):
        left.draw()
        right.draw()
        graph.replay()
        replayed = left.out.clone(), right.out.clone()
        assert torch.equal(replayed[0], stack[0].run(*left.of(64)))
        assert torch.equal(replayed[1], stack[1].run(*right.of(64)))


# ---- eager runs


def test_torch_sees_a_workspace_and_gets_it_back(stack: list[nv.MoeLayer]) -> None:
    """The workspace is in no pool of the caller."""
    inputs, layer = Inputs(4096), stack[0]
    settle()
    pool, before = torch.cuda.MemPool(), allocated()
    with torch.cuda.use_mem_pool(pool):
        for tokens, kept in ((1, 1), (4096, 4096), (7, 4096)):
            layer.run(*inputs.of(tokens), out=inputs.out[:tokens])
            assert allocated() - before == rounded(layer.workspace_bytes(kept), BLOCK)
    assert not pool.snapshot()
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == allocated()
    assert torch.cuda.max_memory_allocated() >= before + layer.workspace_bytes(4096)
    assert nv.release_workspaces("cpu") == 0
    assert nv.release_workspaces("cuda:0") == layer.workspace_bytes(4096)
    assert allocated() == before


def test_a_stream_that_is_given_gets_the_memory(stack: list[nv.MoeLayer]) -> None:
    inputs, layer = Inputs(), stack[0]
    expected = layer.run(*inputs.of(256))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    settle()
    before = allocated()
    for given in (stream, stream.cuda_stream):
        out = layer.run(*inputs.of(256), stream=given)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        stream.synchronize()
        assert torch.equal(out, expected)
    assert allocated() - before == rounded(layer.workspace_bytes(256), BLOCK) + rounded(out.nbytes, BLOCK)

    def run() -> None:  # in a capture too, when torch's current stream is another of the capture's
        stream.wait_stream(torch.cuda.current_stream())
        layer.run(*inputs.of(256), out=inputs.out[:256], stream=stream)
        torch.cuda.current_stream().wait_stream(stream)

    replays_give(run, inputs, expected)


def test_the_callers_workspace_on_the_gpu(stack: list[nv.MoeLayer]) -> None:
    inputs, layer = Inputs(), stack[0]
    size = layer.workspace_bytes(256)
    expected = layer.run(*inputs.of(256))
    settle()
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    before = allocated()
    layer.run(*inputs.of(256), out=inputs.out[:256], workspace=workspace)
    assert allocated() == before and torch.equal(inputs.out[:256], expected)
    replays_give(lambda: layer.run(*inputs.of(256), out=inputs.out[:256], workspace=workspace), inputs, expected)
    crooked = torch.empty(size + 1, dtype=torch.uint8, device="cuda")[1:]
    for wrong, message in (
        (crooked, "a base aligned to 256 bytes"),
        (torch.empty(size, dtype=torch.uint8), r"\(bytes,\) uint8 on cuda:0, .* got .* on cpu"),
    ):
        with pytest.raises(ValueError, match=f"workspace: expected {message}"):
            layer.run(*inputs.of(256), out=inputs.out[:256], workspace=wrong)


class Lent:
    """A tensor of a framework without an exchange table."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: object) -> object:
        return self.tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()


def test_other_frameworks_take_memory_of_the_library(stack: list[nv.MoeLayer]) -> None:
    inputs, layer = Inputs(), stack[0]
    expected = layer.run(*inputs.of(8))
    torch.cuda.synchronize()
    settle()
    before = allocated()
    layer.run(*(Lent(tensor) for tensor in inputs.of(8)), out=inputs.out[:8])
    torch.cuda.synchronize()
    assert allocated() == before and torch.equal(inputs.out[:8], expected)
    assert nv.release_workspaces("cuda:0") == layer.workspace_bytes(8)
    # A capture's own workspace stays while its graph may be replayed.
    lent = [Lent(tensor) for tensor in inputs.of(8)]
    replays_give(lambda: layer.run(*lent, out=inputs.out[:8], stream=torch.cuda.current_stream()), inputs, expected)
    assert nv.release_workspaces("cuda:0") == layer.workspace_bytes(8)


# ---- processes and compilers


@pytest.mark.long
def test_torch_compiles_it_into_its_own_graphs(stack: list[nv.MoeLayer]) -> None:
    import nvfp4_moe.torch_op  # noqa: F401

    handles = [layer.handle for layer in stack]  # integers: a compiler does not trace the layers themselves

    def block(hidden: torch.Tensor, ids: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
        for handle in handles:
            hidden = torch.ops.nvfp4_moe.moe_layer(hidden, ids, router, handle)
        return hidden

    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    for tokens in (16, 64):
        inputs = Inputs(tokens, tokens)
        for _ in range(5):  # warm-up, recording, replays
            inputs.draw()
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(*inputs.of(tokens)).clone(), block(*inputs.of(tokens)))
    torch._dynamo.reset()


def test_the_interpreter_ends_quietly() -> None:
    program = f"""
import sys
sys.path.insert(0, {str(gpu.LAYERS.parent)!r})
import gpu, nvfp4_moe as nv, torch
config = nv.MoeConfig(4, 2, 256, 128)
layer = nv.MoeLayer.from_tensors(config, **gpu.stacks(0, 4, 256, 128), device="cuda:0")
arrays = gpu.on_gpu(gpu.batch(8, 256, 4, 2))
layer.run(*arrays)
with torch.cuda.stream(torch.cuda.Stream()):
    layer.run(*arrays)
graph, out = gpu.captured(lambda: layer.run(*arrays))
graph.replay()
ring = [layer, graph]
ring.append(ring)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")
