"""Asynchronous copies: when they are visible, what they move, and where tensor copies put it."""

import ctypes

import numpy as np
import pytest

from trial.emulator import LaunchError, ptx

ORDERS = ("at-once", "random", "late")


def test_cp_async_is_visible_at_its_wait(emulator):
    """Two groups: before any wait neither is there, after wait_group 1 the first alone."""
    body = """
	mov.u32 %r1, block;
	cp.async.ca.shared.global [%r1], [%rd_a], 16; cp.async.commit_group;
	cp.async.ca.shared.global [%r1+16], [%rd_a+16], 16; cp.async.commit_group;
	ld.shared.u32 %r2, [%r1];
	cp.async.wait_group 1;
	ld.shared.u32 %r3, [%r1]; ld.shared.u32 %r4, [%r1+16];
	cp.async.wait_all;
	ld.shared.u32 %r5, [%r1+16];
	st.global.v4.u32 [%rd_o], {%r2, %r3, %r4, %r5};
"""
    kernel = emulator.kernel(ptx(body, "ao", shared=".shared .align 16 .b8 block[32];"), "test")
    source, out = emulator.put(np.arange(1, 9, dtype=np.uint32)), emulator.empty(16)
    for order in ORDERS:
        with emulator.order(order):
            emulator.launch(kernel, [source, out], block=1)
        assert emulator.get(out, 4, np.uint32).tolist() == [0xFDFDFDFD, 1, 0xFDFDFDFD, 5]


def test_cp_async_fills_with_zeros(emulator):
    body = """
	mov.u32 %r1, block; mov.u32 %r2, 6;
	cp.async.ca.shared.global [%r1], [%rd_a], 16, %r2; cp.async.wait_all;
	ld.shared.v4.u32 {%r3, %r4, %r5, %r6}, [%r1]; st.global.v4.u32 [%rd_o], {%r3, %r4, %r5, %r6};
"""
    source, out = emulator.put(np.arange(1, 17, dtype=np.uint8)), emulator.empty(16)
    kernel = emulator.kernel(ptx(body, "ao", shared=".shared .align 16 .b8 block[16];"), "test")
    emulator.launch(kernel, [source, out], block=1)
    assert emulator.get(out, 16, np.uint8).tolist() == [1, 2, 3, 4, 5, 6] + [0] * 10


def test_bulk_store(emulator):
    """The source may change only after the group's wait: here it does not, and the store arrives."""
    body = """
	mov.u32 %r1, block; st.shared.v4.u32 [%r1], {11, 12, 13, 14};
	fence.proxy.async.shared::cta;
	cp.async.bulk.global.shared::cta.bulk_group [%rd_o], [%r1], 16;
	cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
"""
    out = emulator.empty(16)
    emulator.launch(emulator.kernel(ptx(body, "o", shared=".shared .align 16 .b8 block[16];"), "test"), [out], block=1)
    assert emulator.get(out, 4, np.uint32).tolist() == [11, 12, 13, 14]


def tensor_map(emulator, pointer, dims, strides, box, swizzle=0, kind=1):
    """A CUtensorMap of u16 elements (kind 1). dims and box innermost first, strides in bytes from the second on."""
    storage = (ctypes.c_uint8 * 192)()
    address = -(-ctypes.addressof(storage) // 64) * 64
    rank = len(dims)
    arguments = [
        ctypes.c_void_p(address), kind, rank, pointer,
        (ctypes.c_uint64 * rank)(*dims), (ctypes.c_uint64 * rank)(*strides, 0),
        (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank), 0, swizzle, 0, 0,
    ]  # fmt: skip
    emulator.check(emulator.cuda.cuTensorMapEncodeTiled(*arguments))
    return (ctypes.c_uint8 * 128).from_buffer_copy(ctypes.string_at(address, 128))


TENSOR_LOAD = """
	mov.u32 %r1, %tid.x; mov.u32 %r2, barrier; mov.u32 %r3, block; mov.b64 %rd5, map; setp.ne.u32 %p1, %r1, 0;
	@%p1 bra ready;
	mbarrier.init.shared::cta.b64 [%r2], 1;
	mbarrier.arrive.expect_tx.shared::cta.b64 %rd3, [%r2], BYTES;
	cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd5, {X, Y}], [%r2];
ready:
	bar.sync 0;
again:
	mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r2], 0;
	@!%p4 bra again;
	shl.b32 %r4, %r1, 4; add.u32 %r5, %r3, %r4; mul.wide.u32 %rd1, %r1, 16; add.s64 %rd2, %rd_o, %rd1;
	setp.ge.u32 %p2, %r4, BYTES;
	@%p2 bra done;
	ld.shared.v4.u32 {%r6, %r7, %r8, %r9}, [%r5]; st.global.v4.u32 [%rd2], {%r6, %r7, %r8, %r9};
done:
"""


def loaded_box(emulator, tensor, box, at, swizzle):
    """The bytes in shared memory after a tensor copy, as u16."""
    rows, columns = tensor.shape
    size = box[0] * box[1] * 2
    text = TENSOR_LOAD.replace("BYTES", str(size)).replace("X", str(at[0])).replace("Y", str(at[1]))
    shared = f".shared .align 1024 .b8 block[{size}];\n.shared .align 8 .b8 barrier[8];"
    source, out = emulator.put(tensor), emulator.empty(size)
    text = ptx(text, "o", shared=shared).replace(".param .u64 p_o", ".param .u64 p_o, .param .align 64 .b8 map[128]")
    kernel = emulator.kernel(text, "test")
    made = tensor_map(emulator, source, (columns, rows), (columns * 2,), box, swizzle)
    emulator.launch(kernel, [out, made], block=max(32, size // 16))
    return emulator.get(out, size // 2, np.uint16)


TENSOR = np.arange(40 * 96, dtype=np.uint16).reshape(40, 96)


def boxed(at, box):
    """The box's rows, zero outside the tensor."""
    padded = np.zeros((40 + 64, 96 + 128), np.uint16)
    padded[:40, :96] = TENSOR
    return padded[at[1] : at[1] + box[1], at[0] : at[0] + box[0]]


@pytest.mark.parametrize("order", ORDERS)
def test_tensor_load_without_swizzle(emulator, order):
    with emulator.order(order):
        got = loaded_box(emulator, TENSOR, (32, 16), (8, 5), 0)
    assert (got.reshape(16, 32) == boxed((8, 5), (32, 16))).all()


def test_tensor_load_beyond_the_edge_is_zero(emulator):
    got = loaded_box(emulator, TENSOR, (32, 16), (80, 30), 0)
    assert (got.reshape(16, 32) == boxed((80, 30), (32, 16))).all()


@pytest.mark.parametrize("swizzle, width", [(1, 16), (2, 32), (3, 64)])
def test_tensor_load_swizzled(emulator, swizzle, width):
    """Bits 4 and up of an address are exchanged with the bits that count 128-byte lines: 1, 2 or 3 of them."""
    box = (width, 16)
    got = loaded_box(emulator, TENSOR, box, (16, 3), swizzle).view(np.uint8)
    want = np.ascontiguousarray(boxed((16, 3), box)).view(np.uint8).reshape(-1)
    address = np.arange(len(want))
    place = address ^ (((address >> 7) & ((1 << swizzle) - 1)) << 4)
    assert (got[place] == want).all()


def test_not_a_tensor_map(emulator):
    text = TENSOR_LOAD.replace("BYTES", "64").replace("X", "0").replace("Y", "0")
    shared = ".shared .align 1024 .b8 block[64];\n.shared .align 8 .b8 barrier[8];"
    text = ptx(text, "o", shared=shared).replace(".param .u64 p_o", ".param .u64 p_o, .param .align 64 .b8 map[128]")
    with pytest.raises(LaunchError, match="takes for a tensor map is none"):
        emulator.launch(emulator.kernel(text, "test"), [emulator.empty(64), (ctypes.c_uint8 * 128)()])


@pytest.mark.parametrize("order", ORDERS)
def test_multicast_reaches_both_ctas(emulator, order):
    """The first cta of a cluster copies for both; each waits at its own barrier."""
    body = """
	mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, barrier; mov.u32 %r3, block;
	mbarrier.init.shared::cta.b64 [%r2], 1;
	mbarrier.arrive.expect_tx.shared::cta.b64 %rd3, [%r2], 16;
	barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
	setp.ne.u32 %p1, %r1, 0;
	@%p1 bra again;
	mov.u16 %h1, 3;
	cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r3], [%rd_a], 16, [%r2], %h1;
again:
	mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r2], 0;
	@!%p4 bra again;
	ld.shared.u32 %r4, [%r3+8]; add.u32 %r4, %r4, %r1;
	mul.wide.u32 %rd1, %r1, 4; add.s64 %rd2, %rd_o, %rd1; st.global.u32 [%rd2], %r4;
	barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
"""
    shared = ".shared .align 16 .b8 block[16];\n.shared .align 8 .b8 barrier[8];"
    source, out = emulator.put(np.array([1, 2, 30, 4], np.uint32)), emulator.empty(8)
    with emulator.order(order):
        kernel = emulator.kernel(ptx(body, "ao", shared=shared), "test")
        emulator.launch(kernel, [source, out], grid=2, block=1, cluster=2)
    assert emulator.get(out, 2, np.uint32).tolist() == [30, 31]


def test_tensor_map_replaced_on_the_device(emulator):
    """The map lies in global memory; the kernel gives it another tensor's address and fewer rows."""
    box, at = (32, 16), (8, 5)
    replace = """
	setp.ne.u32 %p5, %r1, 0;
	@%p5 bra replaced;
	tensormap.replace.tile.global_address.global.b1024.b64 [%rd_m], %rd_t;
	tensormap.replace.tile.global_dim.global.b1024.b32 [%rd_m], 1, 12;
	fence.proxy.tensormap::generic.acquire.gpu [%rd_m], 128;
replaced:
"""
    size = box[0] * box[1] * 2
    text = TENSOR_LOAD.replace("BYTES", str(size)).replace("X", str(at[0])).replace("Y", str(at[1]))
    text = text.replace("mov.b64 %rd5, map;", "mov.b64 %rd5, %rd_m;").replace(
        "@%p1 bra ready;", replace + "@%p1 bra ready;"
    )
    shared = f".shared .align 1024 .b8 block[{size}];\n.shared .align 8 .b8 barrier[8];"
    other, source, out = emulator.put(TENSOR), emulator.put(np.zeros_like(TENSOR)), emulator.empty(size)
    made = np.frombuffer(bytes(tensor_map(emulator, source, (96, 40), (192,), box)), np.uint8)
    kernel = emulator.kernel(ptx(text, "mto", shared=shared), "test")
    emulator.launch(kernel, [emulator.put(made), other, out], block=size // 16)
    want = boxed(at, box).copy()
    want[12 - at[1] :] = 0
    assert (emulator.get(out, (16, 32), np.uint16) == want).all()
