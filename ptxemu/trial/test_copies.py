"""Tests of asynchronous copies: when they become visible, and which bytes they move to which place."""

import ctypes

import ml_dtypes
import numpy as np
import pytest

from trial.emulator import ORDERS, LaunchError, ptx

MAP = ".param .u64 p_o, .param .align 64 .b8 map[128]"


@pytest.mark.parametrize("order", ORDERS)
def test_cp_async_is_visible_at_its_wait(emulator, order):
    """Two groups: before any wait neither is visible, after wait_group 1 only the first."""
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
    shared = ".shared .align 16 .b8 block[32];"
    with emulator.order(order):
        got = emulator.run(body, [np.arange(1, 9, dtype=np.uint32)], 4, shared=shared, block=1)
    assert got.tolist() == [0xFDFDFDFD, 1, 0xFDFDFDFD, 5]


@pytest.mark.parametrize("operand, read", [("%r2", 6), ("%p1", 0), ("%p2", 16)])
def test_cp_async_fills_with_zeros(emulator, operand, read):
    """Bytes that are not read become zeros: all after a number of bytes, or all with a predicate."""
    body = f"""
	mov.u32 %r1, block; mov.u32 %r2, 6; setp.eq.u32 %p1, %r2, 6; setp.ne.u32 %p2, %r2, 6;
	cp.async.ca.shared.global [%r1], [%rd_a], 16, {operand}; cp.async.wait_all;
	ld.shared.v4.u32 {{%r3, %r4, %r5, %r6}}, [%r1]; st.global.v4.u32 [%rd_o], {{%r3, %r4, %r5, %r6}};
"""
    source, shared = np.arange(1, 17, dtype=np.uint8), ".shared .align 16 .b8 block[16];"
    got = emulator.run(body, [source], 16, np.uint8, shared=shared, block=1)
    assert (got == np.where(np.arange(16) < read, source, 0)).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "wait", ["cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;", "cp.async.bulk.commit_group;", ""]
)
def test_bulk_store(emulator, wait, order):
    """A thread that ends leaves no store undone, whether it waits for it or not."""
    body = f"""
	mov.u32 %r1, block; st.shared.v4.u32 [%r1], {{11, 12, 13, 14}};
	fence.proxy.async.shared::cta;
	cp.async.bulk.global.shared::cta.bulk_group [%rd_o], [%r1], 16; {wait}
"""
    with emulator.order(order):
        got = emulator.run(body, shape=4, shared=".shared .align 16 .b8 block[16];", block=1)
    assert got.tolist() == [11, 12, 13, 14]


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
	cp.async.bulk.tensor.RANKd.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd5, {AT}], [%r2];
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


def load_of(box, at):
    """The kernel's body, its shared memory, and the box's bytes."""
    size = 2 * int(np.prod(box))
    body = TENSOR_LOAD.replace("BYTES", str(size)).replace("AT", ", ".join(map(str, at))).replace("RANK", str(len(at)))
    return body, f".shared .align 1024 .b8 block[{size}];\n.shared .align 8 .b8 barrier[8];", size


def loaded_box(emulator, tensor, box, at, swizzle=0):
    """The bytes in shared memory after a tensor copy, as u16. The box and its place: innermost dimension first."""
    body, shared, size = load_of(box, at)
    source, out = emulator.put(tensor), emulator.empty(size)
    kernel = emulator.kernel(ptx(body, "o", shared=shared).replace(".param .u64 p_o", MAP), "test")
    made = tensor_map(emulator, source, tensor.shape[::-1], tensor.strides[-2::-1], box, swizzle)
    emulator.launch(kernel, [out, made], block=max(32, size // 16))
    return emulator.get(out, size // 2, np.uint16)


TENSOR = np.arange(40 * 96, dtype=np.uint16).reshape(40, 96)


def boxed(tensor, at, box):
    """The box's elements, zero outside the tensor."""
    padded = np.zeros([n + m for n, m in zip(tensor.shape, box[::-1], strict=True)], np.uint16)
    padded[tuple(map(slice, tensor.shape))] = tensor
    return padded[tuple(slice(x, x + n) for x, n in zip(at[::-1], box[::-1], strict=True))]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("at", [(8, 5), (80, 30)], ids=["inside", "beyond the edge, which is zero"])
@pytest.mark.parametrize("tensor", [TENSOR, TENSOR.reshape(4, 10, 96)], ids=["2d", "3d"])
def test_tensor_load_without_swizzle(emulator, tensor, at, order):
    box = (32, 16) if tensor.ndim == 2 else (32, 4, 3)
    at = at if tensor.ndim == 2 else (at[0], at[1] % 10, 2)
    with emulator.order(order):
        got = loaded_box(emulator, tensor, box, at)
    assert (got.reshape(box[::-1]) == boxed(tensor, at, box)).all()


@pytest.mark.parametrize("swizzle, width", [(1, 16), (2, 32), (3, 64)])
def test_tensor_load_swizzled(emulator, swizzle, width):
    """Bits 4 and up of an address are exchanged with the bits that count 128-byte lines: 1, 2 or 3 of them."""
    box = (width, 16)
    got = loaded_box(emulator, TENSOR, box, (16, 3), swizzle).view(np.uint8)
    want = np.ascontiguousarray(boxed(TENSOR, (16, 3), box)).view(np.uint8).reshape(-1)
    address = np.arange(len(want))
    place = address ^ (((address >> 7) & ((1 << swizzle) - 1)) << 4)
    assert (got[place] == want).all()


def test_not_a_tensor_map(emulator):
    body, shared, size = load_of((8, 4), (0, 0))
    text = ptx(body, "o", shared=shared).replace(".param .u64 p_o", MAP)
    with pytest.raises(LaunchError, match="takes for a tensor map is none"):
        emulator.launch(emulator.kernel(text, "test"), [emulator.empty(size), (ctypes.c_uint8 * 128)()])


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
    source = np.array([1, 2, 30, 4], np.uint32)
    with emulator.order(order):
        got = emulator.run(body, [source], 2, shared=shared, grid=2, block=1, cluster=2)
    assert got.tolist() == [30, 31]


def test_tensor_map_replaced_on_the_device(emulator):
    """The map is in global memory; the kernel gives it another tensor's address and fewer rows."""
    box, at = (32, 16), (8, 5)
    replace = """
	setp.ne.u32 %p5, %r1, 0;
	@%p5 bra replaced;
	tensormap.replace.tile.global_address.global.b1024.b64 [%rd_m], %rd_t;
	tensormap.replace.tile.global_dim.global.b1024.b32 [%rd_m], 1, 12;
	fence.proxy.tensormap::generic.acquire.gpu [%rd_m], 128;
replaced:
"""
    body, shared, size = load_of(box, at)
    body = body.replace("mov.b64 %rd5, map;", "mov.b64 %rd5, %rd_m;")
    text = ptx(body.replace("@%p1 bra ready;", replace + "@%p1 bra ready;"), "mto", shared=shared)
    other, source, out = emulator.put(TENSOR), emulator.put(np.zeros_like(TENSOR)), emulator.empty(size)
    made = np.frombuffer(bytes(tensor_map(emulator, source, (96, 40), (192,), box)), np.uint8)
    emulator.launch(emulator.kernel(text, "test"), [emulator.put(made), other, out], block=size // 16)
    want = boxed(TENSOR, at, box).copy()
    want[12 - at[1] :] = 0
    assert (emulator.get(out, (16, 32), np.uint16) == want).all()


BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
BULK_STORE = "cp.async.bulk.global.shared::cta.bulk_group"


@pytest.mark.parametrize(
    "copy",
    [
        f"{BULK} [%r1+8], [%rd_a], 16, [%r2];",
        f"{BULK} [%r1], [%rd_a+8], 16, [%r2];",
        f"{BULK} [%r1], [%rd_a], 24, [%r2];",
        f"{BULK_STORE} [%rd_o+8], [%r1], 16;",
        f"{BULK_STORE} [%rd_o], [%r1+8], 16;",
        f"{BULK_STORE} [%rd_o], [%r1], 8;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd_o+8], [%r1], 16;",
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r1+24], [%r1+8], 8, [%r2];",
    ],
)
def test_bulk_copies_need_multiples_of_16(emulator, copy):
    """Both addresses and the size (PTX ISA, 9.7.9.25.4.1)."""
    body = f"\n\tmov.u32 %r1, block; mov.u32 %r2, barrier; mbarrier.init.shared.b64 [%r2], 1;\n\t{copy}\n"
    shared = ".shared .align 16 .b8 block[64];\n.shared .align 8 .b8 barrier[8];"
    with pytest.raises(LaunchError, match="addresses and size must be multiples of 16"):
        emulator.run(body, [np.zeros(16, np.uint32)], 16, shared=shared, block=1)


@pytest.mark.parametrize("copy, said", [
    (f"{BULK} [%r1], [%rd_a], 16, [%r2+4];", "misaligned: 8 bytes of shared memory"),
    ("cp.async.cg.shared.global [%r1], [%rd_a+8], 16;", "source's address is not a multiple of the size"),
    ("cp.async.ca.shared.global [%r1+4], [%rd_a], 8;", "misaligned: 8 bytes of shared memory"),
])  # fmt: skip
def test_copies_need_aligned_addresses(emulator, copy, said):
    body = f"\n\tmov.u32 %r1, block; mov.u32 %r2, barrier; mbarrier.init.shared.b64 [%r2], 1;\n\t{copy}\n"
    shared = ".shared .align 16 .b8 block[64];\n.shared .align 8 .b8 barrier[16];"
    with pytest.raises(LaunchError, match=said):
        emulator.run(body, [np.zeros(16, np.uint32)], 16, shared=shared, block=1)


POLLS = """
	mov.u32 %r5, 0;
poll:
	mbarrier.test_wait.parity.shared.b64 %p1, [%r2], 0; @%p1 mov.u32 %r6, 1;
	add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 20; @%p2 bra poll;
	mbarrier.arrive.shared.b64 _, [%r2];
"""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("noinc", ["", ".noinc"])
def test_cp_async_arrives_at_an_mbarrier(emulator, noinc, order):
    """Without .noinc the pending count grows by one first: the phase ends only when the thread itself arrives too."""
    body = f"""
	mov.u32 %r1, block; mov.u32 %r2, barrier; mov.u32 %r6, 0;
	mbarrier.init.shared.b64 [%r2], 1;
	cp.async.ca.shared.global [%r1], [%rd_a], 16;
	cp.async.mbarrier.arrive{noinc}.shared.b64 [%r2];
{"" if noinc else POLLS}
again:
	mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra again;
	ld.shared.u32 %r3, [%r1+4]; st.global.v2.u32 [%rd_o], {{%r3, %r6}};
"""
    shared = ".shared .align 16 .b8 block[16];\n.shared .align 8 .b8 barrier[8];"
    with emulator.order(order):
        got = emulator.run(body, [np.arange(5, 9, dtype=np.uint32)], 2, shared=shared, block=1)
    assert got.tolist() == [6, 0]


TENSOR_ADD = """
	mov.u32 %r1, %tid.x; mov.u32 %r2, block; mov.b64 %rd5, map;
	mul.wide.u32 %rd1, %r1, 16; add.s64 %rd2, %rd_a, %rd1; ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd2];
	shl.b32 %r3, %r1, 4; add.u32 %r3, %r3, %r2; st.shared.v4.u32 [%r3], {%r5, %r6, %r7, %r8};
	fence.proxy.async.shared::cta; bar.sync 0; setp.ne.u32 %p1, %r1, 0;
	@%p1 bra done;
	cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%rd5, {8, 5}], [%r2];
	cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
done:
"""


@pytest.mark.parametrize("kind, dtype", [
    (2, np.uint32), (3, np.int32), (4, np.uint64), (6, np.float16), (7, np.float32), (9, ml_dtypes.bfloat16),
    (1, np.uint16),
])  # fmt: skip
def test_tensor_copies_that_add(emulator, kind, dtype):
    """The map has the type. Half of the box of 16 by 16 elements is beyond the tensor's edge, and adds nothing."""
    generator = np.random.default_rng(kind)
    tensor, box = (generator.integers(0, 200, shape).astype(dtype) for shape in ((24, 16), (16, 16)))
    shared = f".shared .align 1024 .b8 block[{box.nbytes}];"
    text = ptx(TENSOR_ADD, "ao", shared=shared).replace(".param .u64 p_o", MAP)
    source, place = emulator.put(box), emulator.put(tensor)
    made = tensor_map(emulator, place, (16, 24), (16 * tensor.itemsize,), (16, 16), kind=kind)
    kernel = emulator.kernel(text, "test")
    if kind == 1:
        with pytest.raises(LaunchError, match="elements of this tensor map cannot be added"):
            emulator.launch(kernel, [source, source, made], block=box.nbytes // 16)
        return
    emulator.launch(kernel, [source, source, made], block=box.nbytes // 16)
    want = tensor.copy()
    want[5:21, 8:] += box[:, :8]
    assert (emulator.get(place, tensor.shape, dtype) == want).all()
