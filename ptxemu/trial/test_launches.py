"""Launches: dependent ones that overlap, clusters, graphs, and what a launch may ask for."""

import ctypes

import numpy as np
import pytest

from trial.emulator import ORDERS, LaunchConfig, LaunchError, ptx

FIRST = """
	mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd1, %r1, 4; add.s64 %rd2, %rd_a, %rd1; \
mov.u32 %r2, %tid.x; setp.lt.u32 %p1, %r2, 32;
	@%p1 bra trigger;
	nanosleep.u32 100;
	BEFORE
trigger:
	griddepcontrol.launch_dependents;
	@%p1 bra done;
	AFTER
done:
"""
SECOND = """
	mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd1, %r1, 4; add.s64 %rd2, %rd_a, %rd1; add.s64 %rd3, %rd_o, %rd1;
	WAIT
	ld.global.u32 %r2, [%rd2]; st.global.u32 [%rd3], %r2;
"""
STORE, WAIT = "bar.sync 1, 32; st.global.u32 [%rd2], 7;", "griddepcontrol.wait;"


def dependent(emulator, before, after, wait, order):
    """Runs a second launch that reads stores before and after the last of a cta's two warps has triggered it."""
    cells, out = emulator.put(np.zeros(4, np.uint32)), emulator.empty(16)
    first = emulator.kernel(ptx(FIRST.replace("BEFORE", before).replace("AFTER", after), "a"), "test")
    second = emulator.kernel(ptx(SECOND.replace("WAIT", wait), "ao"), "test")
    with emulator.order(order):
        emulator.enqueue(first, [cells], grid=4, block=64)
        emulator.enqueue(second, [cells, out], grid=4, block=1, programmatic=True)
        emulator.finish()
    return emulator.get(out, 4, np.uint32)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("before, after, wait", [("", STORE, WAIT), (STORE, "", "")])
def test_dependent_launch_waits(emulator, before, after, wait, order):
    """It begins once all threads of the first have triggered or ended; griddepcontrol.wait waits for all its work."""
    assert (dependent(emulator, before, after, wait, order) == 7).all()


def test_dependent_launch_without_wait_overlaps(emulator):
    """A kernel that forgets the wait sees what its predecessor has not written yet."""
    assert (dependent(emulator, "", STORE, "", "late") == 0).any()


def test_cluster_reads_its_neighbour(emulator):
    body = """
	mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, block; add.u32 %r3, %r1, 50; st.shared.u32 [%r2], %r3;
	barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
	add.u32 %r4, %r1, 1; and.b32 %r4, %r4, 3; mapa.shared::cluster.u32 %r5, %r2, %r4; ld.shared::cluster.u32 %r6, [%r5];
	barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
	mov.u32 %r7, %ctaid.x; mul.wide.u32 %rd1, %r7, 4; add.s64 %rd2, %rd_o, %rd1; st.global.u32 [%rd2], %r6;
"""
    got = emulator.run(body, shape=8, shared=".shared .align 4 .b8 block[4];", grid=8, block=1, cluster=4)
    assert got.tolist() == [51, 52, 53, 50] * 2


CANCEL = """
	.reg .b128 %q1;
	mov.u32 %r1, %ctaid.x; mov.u32 %r2, barrier; mov.u32 %r3, answer; mov.u32 %r4, 0;
	mbarrier.init.shared::cta.b64 [%r2], 1;
next:
	mul.wide.u32 %rd1, %r1, 4; add.s64 %rd2, %rd_o, %rd1; \
ld.global.u32 %r5, [%rd2]; add.u32 %r5, %r5, 1; st.global.u32 [%rd2], %r5;
	mbarrier.arrive.expect_tx.shared::cta.b64 %rd3, [%r2], 16;
	clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r3], [%r2];
again:
	mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], %r4;
	@!%p1 bra again;
	xor.b32 %r4, %r4, 1;
	ld.shared.b128 %q1, [%r3];
	clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q1;
	@!%p2 bra done;
	clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r1, %q1;
	bra next;
done:
"""


@pytest.mark.parametrize("order", ORDERS)
def test_cancelled_ctas_are_run_by_others(emulator, order):
    """Each cta does its own work and that of the ctas it cancels: all work is done once."""
    shared = ".shared .align 16 .b8 answer[16];\n.shared .align 8 .b8 barrier[8];"
    out = emulator.put(np.zeros(7, np.uint32))
    with emulator.order(order):
        kernel = emulator.kernel(ptx(CANCEL, "o", shared=shared, target="sm_100a"), "test")
        emulator.launch(kernel, [out], grid=7, block=1)
    assert (emulator.get(out, 7, np.uint32) == 1).all()


def test_graph_keeps_its_arguments(emulator):
    body = "\n\tld.global.u32 %r1, [%rd_o]; add.u32 %r1, %r1, %r_n; st.global.u32 [%rd_o], %r1;"
    kernel = emulator.kernel(ptx(body, ("o", "n:u32")), "test")
    out = emulator.put(np.zeros(1, np.uint32))
    stream, graph, executable = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    cuda = emulator.cuda
    emulator.check(cuda.cudaStreamCreate(ctypes.byref(stream)))
    emulator.check(cuda.cudaStreamBeginCapture(stream, 2))
    number = ctypes.c_uint32(5)
    config = LaunchConfig(1, 1, 1, 1, 1, 1, 0, stream, None, 0)
    pointers = (ctypes.c_void_p * 2)(ctypes.addressof(out), ctypes.addressof(number))
    emulator.check(cuda.cuLaunchKernelEx(ctypes.byref(config), kernel, pointers, None))
    emulator.check(cuda.cudaStreamEndCapture(stream, ctypes.byref(graph)))
    number.value = 1000
    emulator.check(cuda.cudaGraphInstantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)))
    assert emulator.get(out, 1, np.uint32)[0] == 0
    for _ in range(3):
        emulator.check(cuda.cudaGraphLaunch(executable, stream))
    emulator.check(cuda.cudaStreamSynchronize(stream))
    assert emulator.get(out, 1, np.uint32)[0] == 15


@pytest.mark.parametrize("options", [{"block": 2048}, {"grid": 3, "cluster": 2}, {"shared": 300000}])
def test_launches_that_no_device_takes(emulator, options):
    with pytest.raises(LaunchError, match="[Ii]nvalid"):
        emulator.launch(emulator.kernel(ptx("\n\tmov.u32 %r1, 0;"), "test"), [], **options)


def test_a_failed_launch_fails_what_follows(emulator):
    """Every later launch fails until the device is reset, as on a GPU."""
    bad = emulator.kernel(ptx("\n\ttrap;"), "test")
    good = emulator.kernel(ptx("\n\tmov.u32 %r1, 0;"), "test")
    emulator.enqueue(bad, [])
    assert emulator.cuda.cudaDeviceSynchronize() != 0
    with pytest.raises(LaunchError):
        emulator.launch(good, [])
    emulator.launch(good, [])
