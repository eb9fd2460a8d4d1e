"""Kernels of several host threads that wait for each other: flags, graphs, mapped host memory, time limits, the checker."""

import contextlib
import ctypes
import os
import threading
import time

import numpy as np
import pytest

from trial.emulator import LaunchConfig, LaunchError, line_of, ptx

# Every rank writes a value and a flag to every rank, and adds up what comes to it until its time (l, ns) runs out. p: the
# ranks' memory, which has 64 bytes for each sender, twice, for even and odd rounds, since a rank may write for the next
# round before another has read of this one. c: the rounds so far. o: the sum, and whether the time ran out.
EXCHANGE = """
	.reg .u32 %r_n; ld.global.u32 %r_n, [%rd_c]; add.u32 %r_n, %r_n, 1;
	mov.u32 %r1, %tid.x; mov.u32 %r9, 0; setp.ge.u32 %p1, %r1, %r_w; @%p1 bra joined;
	mul.wide.u32 %rd1, %r1, 8; add.s64 %rd2, %rd_p, %rd1; ld.global.u64 %rd3, [%rd2];
	and.b32 %r5, %r_n, 1; mul.lo.u32 %r5, %r5, %r_w; add.u32 %r6, %r5, %r_k;
	mul.wide.u32 %rd4, %r6, 64; add.s64 %rd5, %rd3, %rd4;
	mul.lo.u32 %r2, %r_n, 1000; add.u32 %r2, %r2, %r_k;
	st.global.u32 [%rd5+4], %r2;
	SIGNAL
	mul.wide.u32 %rd4, %r_k, 8; add.s64 %rd6, %rd_p, %rd4; ld.global.u64 %rd7, [%rd6];
	add.u32 %r7, %r5, %r1; mul.wide.u32 %rd8, %r7, 64; add.s64 %rd9, %rd7, %rd8;
	mov.u64 %rd20, %globaltimer;
again:
	WAIT
	setp.ge.u32 %p2, %r3, %r_n; @%p2 bra came;
	nanosleep.u32 100;
	mov.u64 %rd21, %globaltimer; sub.u64 %rd22, %rd21, %rd20; setp.lt.u64 %p3, %rd22, %rd_l; @%p3 bra again;
	mov.u32 %r9, 1; bra joined;
came:
	ld.global.u32 %r4, [%rd9+4];
	red.global.add.u32 [%rd_o], %r4;
joined:
	bar.sync 0;
	mov.u32 %r1, %tid.x; setp.ne.u32 %p4, %r1, 0; @%p4 bra late; st.global.u32 [%rd_c], %r_n;
late:
	setp.eq.u32 %p4, %r9, 0; @%p4 bra done; st.global.u32 [%rd_o+4], 1;
done:
"""
SIGNAL, WAIT = "st.release.sys.global.u32 [%rd5], %r_n;", "ld.acquire.sys.global.u32 %r3, [%rd9];"
PARAMETERS = ("p", "o", "w:u32", "k:u32", "c", "l")
SECOND = 1_000_000_000  # ns


class Ranks:
    """The memory of ranks, and their kernel."""

    def __init__(self, emulator, world, limit=3 * SECOND, signal=SIGNAL, wait=WAIT):
        self.emulator, self.world, self.limit = emulator, world, limit
        self.memory = [emulator.put(np.zeros(32 * world, np.uint32)) for _ in range(world)]
        self.peers = emulator.put(np.array([pointer.value for pointer in self.memory], np.uint64))
        self.rounds = [emulator.put(np.zeros(1, np.uint32)) for _ in range(world)]
        self.out = [emulator.put(np.zeros(2, np.uint32)) for _ in range(world)]
        self.text = ptx(EXCHANGE.replace("SIGNAL", signal).replace("WAIT", wait), PARAMETERS)
        self.kernel = emulator.kernel(self.text, "test")

    def arguments(self, rank):
        return [self.peers, self.out[rank], ctypes.c_uint32(self.world), ctypes.c_uint32(rank), self.rounds[rank],
                ctypes.c_uint64(self.limit)]  # fmt: skip

    def result(self, rank):
        """The sum of what came to a rank, and whether its time ran out."""
        return self.emulator.get(self.out[rank], 2, np.uint32).tolist()

    def expected(self, rounds):
        return [sum(1000 * n * self.world + sum(range(self.world)) for n in range(1, rounds + 1)), 0]

    def run(self, rank, rounds):
        for number in range(1, rounds + 1):
            self.emulator.launch(self.kernel, self.arguments(rank))
            assert self.result(rank) == self.expected(number)


def together(calls):
    """Runs each call in a host thread of its own; the first that fails is raised."""
    failed = []

    def run(call):
        try:
            call()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a host thread hangs"
    if failed:
        raise failed[0]


@contextlib.contextmanager
def patience(seconds):
    os.environ["PTXEMU_PATIENCE"] = str(seconds)
    try:
        yield
    finally:
        del os.environ["PTXEMU_PATIENCE"]


@pytest.mark.parametrize("world, order", [(2, "at-once"), (4, "at-once"), (2, "random"), (4, "random"), (4, "late")])
def test_ranks_exchange(emulator, world, order):
    ranks = Ranks(emulator, world)
    with emulator.order(order):
        together([lambda k=k: ranks.run(k, 25) for k in range(world)])


def graph_of(emulator, stream, kernel, arguments, launches):
    cuda, graph, executable = emulator.cuda, ctypes.c_void_p(), ctypes.c_void_p()
    emulator.check(cuda.cudaStreamBeginCapture(stream, 1))
    for _ in range(launches):
        config = LaunchConfig(1, 1, 1, 32, 1, 1, 0, stream, None, 0)
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        emulator.check(cuda.cuLaunchKernelEx(ctypes.byref(config), kernel, pointers, None))
    emulator.check(cuda.cudaStreamEndCapture(stream, ctypes.byref(graph)))
    emulator.check(cuda.cudaGraphInstantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)))
    return executable


@pytest.mark.parametrize("world", [2, 4])
def test_graphs_of_ranks_exchange(emulator, world):
    """Three rounds a graph; launched twice before it is waited for."""
    ranks = Ranks(emulator, world)

    def rank(k):
        stream = ctypes.c_void_p()
        emulator.check(emulator.cuda.cudaStreamCreate(ctypes.byref(stream)))
        graph = graph_of(emulator, stream, ranks.kernel, ranks.arguments(k), 3)
        for replay in range(1, 6):
            for _ in range(2):
                emulator.check(emulator.cuda.cudaGraphLaunch(graph, stream))
            emulator.check(emulator.cuda.cudaStreamSynchronize(stream))
            assert ranks.result(k) == ranks.expected(6 * replay)

    together([lambda k=k: rank(k) for k in range(world)])


def test_a_launch_runs_though_its_thread_does_not_wait(emulator):
    """Rank 0 launches and goes to the host's own work; who waits runs that launch too."""
    ranks, done = Ranks(emulator, 2), threading.Event()

    def first():
        emulator.enqueue(ranks.kernel, ranks.arguments(0))
        assert done.wait(30)
        emulator.finish()

    def second():
        ranks.run(1, 1)
        done.set()

    together([first, second])
    assert ranks.result(0) == ranks.expected(1)


def test_a_rank_that_never_comes_ends_by_the_time(emulator):
    ranks, began = Ranks(emulator, 2, limit=SECOND // 4), time.monotonic()
    emulator.launch(ranks.kernel, ranks.arguments(0))
    assert 0.25 <= time.monotonic() - began < 10
    assert ranks.result(0) == [1000, 1]  # what it sent to itself


SPIN = "\nagain:\n\tld.acquire.sys.global.u32 %r1, [%rd_a]; SLEEP setp.eq.u32 %p1, %r1, 0; @%p1 bra again;"


def test_a_wait_without_a_limit_ends_by_patience(emulator):
    kernel = emulator.kernel(ptx(SPIN.replace("SLEEP", "nanosleep.u32 100;"), "a"), "test")
    with patience(0.3), pytest.raises(LaunchError, match="nobody has come"):
        emulator.launch(kernel, [emulator.put(np.zeros(1, np.uint32))], block=1)


def test_a_wait_that_never_sleeps_is_stuck_at_once(emulator):
    kernel = emulator.kernel(ptx(SPIN.replace("SLEEP", ""), "a"), "test")
    with pytest.raises(LaunchError, match="no progress"):
        emulator.launch(kernel, [emulator.put(np.zeros(1, np.uint32))], block=1)


def test_a_launch_that_fails_ends_those_that_wait_for_it(emulator):
    ranks, errors = Ranks(emulator, 2, limit=30 * SECOND), []
    bad = emulator.kernel(ptx("\n\ttrap;"), "test")
    cuda, waits = emulator.cuda, threading.Event()

    def first():
        emulator.enqueue(ranks.kernel, ranks.arguments(0))
        waits.set()
        errors.append(cuda.cudaDeviceSynchronize())

    def second():
        assert waits.wait(10)
        emulator.enqueue(bad, [])
        errors.append(cuda.cudaDeviceSynchronize())

    together([first, second])
    cuda.cudaDeviceReset()
    assert errors == [719, 719]


# ---- the host's memory

TALK = """
	ld.global.u32 %r5, [%rd_a];
	st.volatile.global.u32 [%rd_h], 1;
again:
	ld.volatile.global.u32 %r1, [%rd_h+4]; setp.ne.u32 %p1, %r1, 0; @%p1 bra told;
	nanosleep.u32 1000;
	bra again;
told:
	membar.sys; add.u32 %r2, %r1, 1; st.volatile.global.u32 [%rd_h+8], %r2;
	ld.global.u32 %r5, [%rd_a];
"""


def mapped(emulator, words):
    """Pinned memory as the host has it, and as the device does."""
    host, on_device = ctypes.c_void_p(), ctypes.c_void_p()
    emulator.check(emulator.cuda.cudaHostAlloc(ctypes.byref(host), ctypes.c_size_t(4 * words), 2))
    emulator.check(emulator.cuda.cudaHostGetDevicePointer(ctypes.byref(on_device), host, 0))
    array = np.ctypeslib.as_array(ctypes.cast(host, ctypes.POINTER(ctypes.c_uint32)), (words,))
    array[:] = 0
    return array, on_device


def until(over):
    end = time.monotonic() + 20
    while not over():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_the_host_talks_with_a_kernel(emulator):
    """One host thread waits for the kernel, another reads what it stores and tells it to stop."""
    words, pointer = mapped(emulator, 3)
    kernel, other = emulator.kernel(ptx(TALK, "ha"), "test"), emulator.put(np.zeros(1, np.uint32))

    def host():
        until(lambda: words[0] == 1)
        assert words[2] == 0
        words[1] = 41
        until(lambda: words[2] == 42)

    with patience(20):
        together([lambda: emulator.launch(kernel, [pointer, other], block=1), host])


def test_a_thread_asks_and_stops_its_own_kernel(emulator):
    """As one that watches over a time limit does: queries say that it is not ready."""
    words, pointer = mapped(emulator, 3)
    kernel, other = emulator.kernel(ptx(TALK, "ha"), "test"), emulator.put(np.zeros(1, np.uint32))
    cuda, event = emulator.cuda, ctypes.c_void_p()
    emulator.check(cuda.cudaEventCreate(ctypes.byref(event)))
    emulator.enqueue(kernel, [pointer, other], block=1)
    emulator.check(cuda.cudaEventRecord(event, None))
    assert [cuda.cudaEventQuery(event), cuda.cudaStreamQuery(None)] == [600, 600]
    assert words.tolist() == [1, 0, 0]
    words[1] = 7
    until(lambda: cuda.cudaEventQuery(event) == 0)
    assert words[2] == 8
    emulator.check(cuda.cudaStreamQuery(None))
    emulator.check(cuda.cudaEventSynchronize(event))


def test_memory_that_is_freed_while_a_kernel_waits(emulator):
    words, pointer = mapped(emulator, 3)
    kernel, other = emulator.kernel(ptx(TALK, "ha"), "test"), emulator.put(np.zeros(1, np.uint32))

    def host():
        until(lambda: words[0] == 1)
        emulator.free(other)
        words[1] = 1

    with pytest.raises(LaunchError, match="out of bounds.*in freed device memory"):
        together([lambda: emulator.launch(kernel, [pointer, other], block=1), host])


def test_handles_of_memory(emulator):
    """Within the process they give the memory itself, and only while it is there."""
    cuda, handle, opened = emulator.cuda, (ctypes.c_uint8 * 64)(), ctypes.c_void_p()

    class Handle(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_uint8 * 64)]

    def open_it():
        return cuda.cudaIpcOpenMemHandle(ctypes.byref(opened), Handle(handle), 1)

    assert open_it() == 400
    memory = emulator.put(np.arange(8, dtype=np.uint32))
    emulator.check(cuda.cudaIpcGetMemHandle(handle, memory))
    emulator.check(open_it())
    assert emulator.get(opened, 8, np.uint32).tolist() == list(range(8))
    emulator.check(cuda.cudaIpcCloseMemHandle(opened))
    assert cuda.cudaIpcCloseMemHandle(opened) == 1
    emulator.free(memory)
    assert open_it() == 205
    can = ctypes.c_int(7)
    assert [cuda.cudaDeviceCanAccessPeer(ctypes.byref(can), 0, 0), can.value] == [0, 0]
    assert [cuda.cudaDeviceCanAccessPeer(ctypes.byref(can), 0, 1), cuda.cudaDeviceEnablePeerAccess(0, 0)] == [101, 101]
    cuda.cudaGetLastError()


def test_the_hosts_own_memory_is_registered(emulator):
    words, cuda = np.array([5, 0], np.uint32), emulator.cuda
    pointer = ctypes.c_void_p(words.ctypes.data)
    kernel = emulator.kernel(ptx("\n\tld.global.u32 %r1, [%rd_h]; st.global.u32 [%rd_h+4], %r1;", "h"), "test")
    with pytest.raises(LaunchError, match="out of bounds"):
        emulator.launch(kernel, [pointer], block=1)
    emulator.check(cuda.cudaHostRegister(pointer, ctypes.c_size_t(8), 2))
    assert cuda.cudaHostRegister(pointer, ctypes.c_size_t(8), 2) == 712
    emulator.launch(kernel, [pointer], block=1)
    assert words.tolist() == [5, 5]
    emulator.check(cuda.cudaHostUnregister(pointer))
    assert cuda.cudaHostUnregister(pointer) == 713
    cuda.cudaGetLastError()


# ---- the checker of order

VOLATILE = "st.volatile.global.u32 [%rd5], %r_n;"
RELAXED = "ld.relaxed.sys.global.u32 %r3, [%rd9];"


@pytest.mark.parametrize(
    "signal, wait",
    [
        (SIGNAL, WAIT),
        ("membar.sys; " + VOLATILE, WAIT),
        ("fence.acq_rel.sys; st.relaxed.sys.global.u32 [%rd5], %r_n;", "ld.volatile.global.u32 %r3, [%rd9]; fence.acq_rel.sys;"),
        ("red.release.sys.global.max.u32 [%rd5], %r_n;", WAIT),
    ],
)  # fmt: skip
@pytest.mark.parametrize("world", [2, 3])
def test_ordered_ranks_are_clean(emulator, world, signal, wait):
    ranks = Ranks(emulator, world, signal=signal, wait=wait)
    with emulator.checked():
        together([lambda k=k: ranks.run(k, 8) for k in range(world)])


@pytest.mark.parametrize(
    "signal, wait",
    [
        (SIGNAL.replace("sys", "gpu"), WAIT),
        (SIGNAL, WAIT.replace("sys", "gpu")),
        (VOLATILE, WAIT),
        ("fence.acq_rel.gpu; " + VOLATILE, WAIT),
        (SIGNAL, RELAXED),
        (SIGNAL, RELAXED + " fence.acq_rel.gpu;"),
    ],
)
def test_ranks_without_an_order_are_reported(emulator, signal, wait):
    """What a rank wrote and another read, by the lines of both."""
    ranks = Ranks(emulator, 2, signal=signal, wait=wait)
    with emulator.checked(), pytest.raises(LaunchError, match="at the scope of the system") as raised:
        together([lambda k=k: ranks.run(k, 1) for k in range(2)])
    said = str(raised.value)
    store, load = line_of(ranks.text, "st.global.u32 [%rd5+4]"), line_of(ranks.text, "ld.global.u32 %r4")
    assert f"PTX line {store}:" in said and f"PTX line {load}:" in said, said


LATER = "\n\tld.global.u32 %r1, [%rd_d]; st.global.u32 [%rd_o], %r1;"
SENDER = """
	st.global.u32 [%rd_d], 9; st.release.sys.global.u32 [%rd_f], 1;
again:
	ld.acquire.sys.global.u32 %r1, [%rd_f+4]; nanosleep.u32 100; setp.eq.u32 %p1, %r1, 0; @%p1 bra again;
"""
WAITER = SPIN.replace("%rd_a", "%rd_f").replace("SLEEP", "nanosleep.u32 100;")
ANSWER = "\n\tst.release.sys.global.u32 [%rd_f+4], 1;"


@pytest.mark.parametrize("acquires", [True, False])
@pytest.mark.parametrize("programmatic", [True, False])
def test_launches_know_what_those_before_acquired(emulator, acquires, programmatic):
    """What one launch waits for the next one reads, while the rank that wrote it still runs."""
    wait = WAITER if acquires else WAITER.replace("acquire", "relaxed")
    later = "\n\tgriddepcontrol.wait;" + LATER
    data, flags, out = (emulator.put(np.zeros(4, np.uint32)) for _ in range(3))
    kernels = [emulator.kernel(ptx(body, names), "test") for body, names in ((wait, "f"), (later, "do"), (ANSWER, "f"))]
    sender, enqueued = emulator.kernel(ptx(SENDER, "df"), "test"), threading.Event()

    def first():
        for kernel, arguments in zip(kernels, ([flags], [data, out], [flags]), strict=True):
            emulator.enqueue(kernel, arguments, block=1, programmatic=programmatic)
        enqueued.set()
        emulator.finish()

    def second():
        assert enqueued.wait(10)
        emulator.launch(sender, [data, flags], block=1)

    with emulator.checked(), contextlib.ExitStack() as stack:
        if not acquires:
            stack.enter_context(pytest.raises(LaunchError, match="at the scope of the system"))
        together([first, second])
        assert emulator.get(out, 1, np.uint32)[0] == 9


def test_launches_of_host_threads_in_turn_are_ordered(emulator):
    """What had ended before a launch was enqueued counts as told by the host."""
    cell = emulator.put(np.zeros(1, np.uint32))
    kernel = emulator.kernel(ptx("\n\tld.global.u32 %r1, [%rd_a]; add.u32 %r1, %r1, 1; st.global.u32 [%rd_a], %r1;", "a"), "test")  # fmt: skip
    with emulator.checked():
        for _ in range(3):
            together([lambda: emulator.launch(kernel, [cell], block=1)])
    assert emulator.get(cell, 1, np.uint32)[0] == 3
