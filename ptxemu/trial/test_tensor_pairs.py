"""tcgen05.mma: products of one cta and of pairs, block-scaled ones, and copies for pairs."""

import ml_dtypes
import numpy as np
import pytest

from trial.emulator import ORDERS, ptx
from trial.test_copies import MAP, tensor_map
from trial.test_matrices import BF16, core_matrices, integers, plain_sum

GENERATOR = np.random.default_rng(11)
REGISTERS = [f"%r{30 + i}" for i in range(16)]


# Shared memory: what a cta multiplies, ITEMS times 16 bytes, out of %rd_a plus OFFSET times the rank. One thread of the
# first cta multiplies (ISSUE); its commit opens the barrier of every cta. Then 128 threads read 16 columns each.
PRODUCT = """
	mov.u32 %r1, %tid.x; mov.u32 %r2, block; mov.u32 %r20, barrier; \
mov.u32 %r21, place; mov.u32 %r3, %r1; mov.u32 %r22, %cluster_ctarank;
	mul.wide.u32 %rd20, %r22, OFFSET; add.s64 %rd21, %rd_a, %rd20;
store:
	shl.b32 %r4, %r3, 4; add.u32 %r5, %r2, %r4; mul.wide.u32 %rd1, %r3, 16; add.s64 %rd2, %rd21, %rd1;
	ld.global.v4.u32 {%r6, %r7, %r8, %r9}, [%rd2]; st.shared.v4.u32 [%r5], {%r6, %r7, %r8, %r9};
	add.u32 %r3, %r3, 128; setp.lt.u32 %p1, %r3, ITEMS;
	@%p1 bra store;
	shr.u32 %r10, %r1, 5; setp.ne.u32 %p2, %r10, 0;
	@%p2 bra ready;
	tcgen05.alloc.cta_group::GROUP.sync.aligned.shared::cta.b32 [%r21], ALLOCATED;
	setp.ne.u32 %p3, %r1, 0;
	@!%p3 mbarrier.init.shared::cta.b64 [%r20], 1;
ready:
	fence.proxy.async.shared::cta;
	tcgen05.fence::before_thread_sync;
	barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
	tcgen05.fence::after_thread_sync;
	ld.shared.u32 %r11, [%r21];
	or.b32 %r23, %r1, %r22; setp.ne.u32 %p4, %r23, 0;
	@%p4 bra wait;
	shr.u32 %r12, %r2, 4; cvt.u64.u32 %rd3, %r12; mov.b64 %rd4, 0x0000401000080000; or.b64 %rd3, %rd3, %rd4;
	add.s64 %rd5, %rd3, 256;
	mov.u32 %r13, IDESC; setp.ne.u32 %p5, %r13, %r13; setp.eq.u32 %p6, %r13, %r13;
ISSUE
	mov.u16 %h1, 3;
	tcgen05.commit.cta_group::GROUP.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r20], %h1;
wait:
	mbarrier.try_wait.parity.shared::cta.b64 %p7, [%r20], 0;
	@!%p7 bra wait;
	tcgen05.fence::after_thread_sync;
	shl.b32 %r14, %r10, 21; add.u32 %r15, %r11, %r14; add.u32 %r15, %r15, COLUMN;
	tcgen05.ld.sync.aligned.32x32b.x16.b32 {REGISTERS}, [%r15];
	tcgen05.wait::ld.sync.aligned;
	mul.wide.u32 %rd22, %r22, 8192; add.s64 %rd23, %rd_o, %rd22;
	mul.wide.u32 %rd6, %r1, 64; add.s64 %rd7, %rd23, %rd6;
STORES
	barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
	@%p2 bra done;
	tcgen05.dealloc.cta_group::GROUP.sync.aligned.b32 %r11, ALLOCATED;
done:
"""


def product(emulator, operands, issue, idesc, ctas, column=0, allocated=64):
    """(ctas, 128, 16) of D: columns `column` and up of tensor memory, after the instructions of `issue`."""
    stores = "\n".join(f"\tst.global.u32 [%rd7+{4 * i}], {name};" for i, name in enumerate(REGISTERS))
    items = operands[0].nbytes // 16
    text = PRODUCT.replace("STORES", stores).replace("ISSUE", issue).replace("IDESC", str(idesc))
    text = text.replace("REGISTERS", ", ".join(REGISTERS)).replace("GROUP", str(ctas)).replace("COLUMN", str(column))
    text = text.replace("ITEMS", str(items)).replace("OFFSET", str(16 * items))
    text = text.replace("ALLOCATED", str(allocated))
    if ctas == 1:
        text = text.replace("mov.u16 %h1, 3;", "mov.u16 %h1, 1;")
    shared = (
        f".shared .align 1024 .b8 block[{16 * items}];\n"
        ".shared .align 8 .b8 barrier[8];\n.shared .align 4 .b8 place[4];"
    )
    options = {"shared": shared, "target": "sm_100a", "grid": ctas, "block": 128, "cluster": ctas}
    return emulator.run(text, [np.concatenate(operands)], (ctas, 128, 16), np.float32, **options)


def scale_atom(codes):
    """(128, 4) scales as 32 lines of 16 bytes: line i holds rows i, i + 32, i + 64, i + 96."""
    return codes.reshape(4, 32, 4).transpose(1, 0, 2).reshape(-1)


def scaled(codes, scales):
    """E2M1 codes (rows, k) times the scale of each 16."""
    return codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * np.repeat(scales.astype(np.float32), 16, axis=1)


def packed(codes):
    """(rows, 32) bytes as core matrices of 8 rows by 16 bytes."""
    rows = (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(-1, 8, 2, 16)
    return rows.transpose(0, 2, 1, 3).reshape(-1)


@pytest.mark.parametrize("order", ORDERS)
def test_block_scaled_product(emulator, order):
    """mxf4nvf4 of 128 by 16 by 64, scales by tcgen05.cp. The second product does not accumulate: D is one product."""
    a, b = GENERATOR.integers(0, 16, (128, 64)).astype(np.uint8), GENERATOR.integers(0, 16, (16, 64)).astype(np.uint8)
    # Every scale code, NaN included.
    scales_a = GENERATOR.permutation(np.repeat(np.arange(256), 2)).astype(np.uint8).reshape(128, 4)
    scales_b = GENERATOR.integers(0, 127, (128, 4)).astype(np.uint8)

    codes = [packed(a), packed(b)] + [scale_atom(scales) for scales in (scales_a, scales_b)]
    issue = """
	sub.s64 %rd7, %rd3, 0x800000000; // 128 bytes from eight lines to the next
	add.s64 %rd8, %rd7, 288; add.s64 %rd9, %rd7, 320; add.u32 %r24, %r11, 16; add.u32 %r25, %r11, 20;
	tcgen05.cp.cta_group::1.32x128b.warpx4 [%r24], %rd8; tcgen05.cp.cta_group::1.32x128b.warpx4 [%r25], %rd9;
	tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%r11], %rd3, %rd5, %r13, [%r24], [%r25], %p5;
	tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%r11], %rd3, %rd5, %r13, [%r24], [%r25], %p5;
"""
    idesc = 1 << 7 | 1 << 10 | (16 // 8) << 17 | (128 // 16) << 24
    with emulator.order(order):
        got = product(emulator, [np.concatenate(codes)], issue, idesc, 1)
    want = [[plain_sum(a[m], b[n], scales_a[m], scales_b[n]) for n in range(16)] for m in range(128)]
    want = np.array(want).astype(np.float32)
    assert np.isnan(want).any()
    assert (got[0].view(np.uint32) == np.where(np.isnan(want), 0x7FFFFFFF, want.view(np.uint32))).all()


@pytest.mark.parametrize("order", ORDERS)
def test_product_of_one_cta(emulator, order):
    """kind::f16 of 128 by 16 by 16, twice: the work of one thread is done in its order."""
    a, b = integers((128, 16)), integers((16, 16))
    operands = [np.concatenate([core_matrices(part).reshape(-1) for part in (a, b)]).astype(BF16)]
    first, second = (
        f"	tcgen05.mma.cta_group::1.kind::f16 [%r11], %rd3, %rd5, %r13, {add};\n" for add in ("%p5", "%p6")
    )
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | (16 // 8) << 17 | (128 // 16) << 24
    with emulator.order(order):
        got = product(emulator, operands, first + second, idesc, 1)
        both_add = product(emulator, operands, second + second, idesc, 1)
    assert (got[0] == 2 * (a @ b.T)).all()
    assert np.isnan(both_add).all()  # to what nobody has written


@pytest.mark.parametrize("order", ORDERS)
def test_product_of_a_pair(emulator, order):
    """kind::f16 of 256 by 32 by 16: each cta has 128 rows of A and of D, and 16 of the 32 rows of B."""
    a, b = integers((256, 16)), integers((32, 16))
    parts = [(a[:128], b[:16]), (a[128:], b[16:])]
    operands = [np.concatenate([core_matrices(part).reshape(-1) for part in both]) for both in parts]
    issue = "	tcgen05.mma.cta_group::2.kind::f16 [%r11], %rd3, %rd5, %r13, %p5;\n"
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | (32 // 8) << 17 | (256 // 16) << 24
    for column in (0, 16):
        with emulator.order(order):
            got = product(emulator, [x.astype(BF16) for x in operands], issue, idesc, 2, column)
        assert (got.reshape(256, 16) == (a @ b.T)[:, column : column + 16]).all()


PAIR_COPY = """
	mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, barrier; mov.u32 %r3, block; mov.b64 %rd5, map;
	mbarrier.init.shared::cta.b64 [%r2], 1;
	barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
	setp.eq.u32 %p1, %r1, 0;
	@%p1 bra again;
	mapa.shared::cluster.u32 %r10, %r2, 0; mov.u16 %h1, 3;
	mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%r10], 1024;
	cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster \
[%r3], [%rd5, {8, 5}], [%r10], %h1;
	bra arrived;
again:
	mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r2], 0;
	@!%p4 bra again;
arrived:
	barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
	ld.shared.u32 %r4, [%r3+64];
	mul.wide.u32 %rd1, %r1, 4; add.s64 %rd2, %rd_o, %rd1; st.global.u32 [%rd2], %r4;
"""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("late", [False, True], ids=["", "the group before .multicast"])
def test_copy_for_a_pair_signals_one_barrier(emulator, late, order):
    """The second cta copies for both: the barrier of the first, which the address names, gets the bytes of both."""
    tensor, box = np.arange(40 * 96, dtype=np.uint16).reshape(40, 96), (16, 16)
    shared = ".shared .align 1024 .b8 block[512];\n.shared .align 8 .b8 barrier[8];"
    text = ptx(PAIR_COPY, "o", shared=shared, target="sm_100a")
    if late:  # as ThunderKittens has it, and ptxas takes it
        text = text.replace(".cta_group::2", "").replace(".multicast", ".cta_group::2.multicast")
    text = text.replace(".param .u64 p_o", MAP)
    source, out = emulator.put(tensor), emulator.empty(8)
    made = tensor_map(emulator, source, (96, 40), (192,), box)
    with emulator.order(order):
        emulator.launch(emulator.kernel(text, "test"), [out, made], grid=2, block=1, cluster=2)
    want = int(tensor[5 + 2, 8]) | int(tensor[5 + 2, 9]) << 16
    assert emulator.get(out, 2, np.uint32).tolist() == [want, want]
