"""Litmus tests of wgmma and tcgen05; litmus.py has those of memory and barriers."""

from trial.litmus import BARRIER, INIT, Litmus, wait

# Shared memory as in test_matrices: operands of a wgmma as core matrices, written by the generic proxy.
WGMMA = """
	shl.b32 %r9, %r1, 4; add.u32 %r9, %r2, %r9;
	st.shared.v4.u32 [%r9], {0, 0, 0, 0}; st.shared.v4.u32 [%r9+2048], {0, 0, 0, 0};
	fence.proxy.async.shared::cta;
	bar.sync 0;
	shr.u32 %r10, %r2, 4; cvt.u64.u32 %rd5, %r10; mov.b64 %rd4, 0x0000001000080000; or.b64 %rd5, %rd5, %rd4;
	add.s64 %rd6, %rd5, 128; setp.ne.u32 %p5, %r1, %r1;
	mov.f32 %f1, 0f00000000; mov.f32 %f2, 0f00000000; mov.f32 %f3, 0f00000000; mov.f32 %f4, 0f00000000;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1,%f2,%f3,%f4}, %rd5, %rd6, %p5, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 0;
	bar.sync 1;
	xor.b32 %r11, %r9, 512; st.shared.v4.u32 [%r11], {1, 1, 1, 1};
"""
PRODUCT = "wgmma.mma_async"
LITMUS = [
    Litmus(
        "wgmma and its operands",
        WGMMA,
        [
            ("fence.proxy.async.shared::cta;", "", PRODUCT, "st.shared.v4.u32 [%r9], {0", "fence.proxy.async"),
            ("bar.sync 0;", "bar.warp.sync -1;", PRODUCT, "st.shared.v4.u32 [%r9], {0", BARRIER),
            ("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;", "{1, 1, 1, 1}", PRODUCT,
             "wgmma.wait_group"),
            ("bar.sync 1;", "", "{1, 1, 1, 1}", PRODUCT, "and a barrier for other threads"),
            ("wgmma.fence.sync.aligned;", "", PRODUCT, "", "wgmma.fence between the two"),
            ("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned;\n\tadd.f32 %f2, %f2, %f2;", PRODUCT,
             "add.f32 %f2", "wgmma.fence between"),
        ],
        {"block": 128},
    )
]  # fmt: skip

# Around each body on tcgen05: an mbarrier of the given number of arrivals at %r8 and one of a single arrival after it,
# and 32 columns of tensor memory at %r11, which the first warp allocates and frees.
ALLOCATED = """
	@%p2 bra allocated;
	tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r20], 32;
allocated:
	tcgen05.fence::before_thread_sync; // of alloc
	bar.sync 1;
	tcgen05.fence::after_thread_sync; // of alloc
	ld.shared.u32 %r11, [%r20];
"""
GIVEN_BACK = """
	tcgen05.fence::before_thread_sync; // of dealloc
	bar.sync 2;
	tcgen05.fence::after_thread_sync; // of dealloc
	@%p2 bra done;
	tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r11, 32;
done:
"""


def with_tensor_memory(arrivals, body):
    return INIT.replace("COUNT", str(arrivals)) + ALLOCATED + body + GIVEN_BACK


def operands(add):
    """Operands of a product of kind::f16, 128 by 16 by 16: core matrices at the beginning of shared memory.

    `add`: to what D has been.
    """
    kind = 1 << 4 | 1 << 7 | 1 << 10 | (16 // 8) << 17 | (128 // 16) << 24
    return f"""
	shr.u32 %r14, %r2, 4; cvt.u64.u32 %rd5, %r14; mov.b64 %rd4, 0x0000401000080000; or.b64 %rd5, %rd5, %rd4;
	add.s64 %rd6, %rd5, 256; mov.u32 %r15, {kind}; setp.{"eq" if add else "ne"}.u32 %p5, %r1, %r1;
"""


def product(barrier, which=""):
    return f"""
	tcgen05.mma.cta_group::1.kind::f16 [%r11], %rd5, %rd6, %r15, %p5; // {which}
	tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{barrier}];
"""


# Operands of zeros: a first product, its D read by all warps, then a second product over it.
TENSOR = with_tensor_memory(
    1,
    """
	shl.b32 %r9, %r1, 4; add.u32 %r9, %r2, %r9;
	st.shared.v4.u32 [%r9], {0, 0, 0, 0}; st.shared.v4.u32 [%r9+2048], {0, 0, 0, 0};
	and.b32 %r10, %r1, 96; setp.eq.u32 %p4, %r10, 32; @%p4 st.shared.v4.u32 [%r9+3584], {0, 0, 0, 0};
	fence.proxy.async.shared::cta; // of the zeros
	shr.u32 %r12, %r1, 5; shl.b32 %r12, %r12, 21; add.u32 %r13, %r11, %r12;
	tcgen05.st.sync.aligned.32x32b.x2.b32 [%r13], {%r1, %r1};
	tcgen05.wait::st.sync.aligned;
	tcgen05.fence::before_thread_sync; // of st
	bar.sync 3;
	setp.ne.u32 %p6, %r1, 32; @%p6 bra first;
	tcgen05.fence::after_thread_sync; // of st
"""
    + operands(add=True)
    + product("%r8", "first")
    + wait("%r8", 0, "first")
    + """
	tcgen05.fence::after_thread_sync; // of the first
	tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r16, %r17}, [%r13];
	tcgen05.wait::ld.sync.aligned;
	st.shared.u32 [%r4], %r16; // operand
	fence.proxy.async.shared::cta; // of the operand
	tcgen05.fence::before_thread_sync; // of ld
	bar.sync 4;
	@%p6 bra second;
	tcgen05.fence::after_thread_sync; // of ld
"""
    + product("%r8", "second")
    + wait("%r8", 1, "second"),
)

# A stage that one warp writes, another's product reads, and a third writes again. The third is ordered after the
# first one's writes only by the commit.
STAGE = with_tensor_memory(
    32,
    """
	shl.b32 %r9, %r1, 4; add.u32 %r9, %r2, %r9;
	@%p2 bra full;
	st.shared.v4.u32 [%r9], {0, 0, 0, 0};
	fence.proxy.async.shared::cta;
	mbarrier.arrive.shared::cta.b64 %rd4, [%r8];
	bra end;
full:
	setp.ge.u32 %p6, %r1, 64; @%p6 bra refill;
	setp.ne.u32 %p6, %r1, 32; @%p6 bra end;
"""
    + wait("%r8", 0, "product")
    + operands(add=False)
    + product("%r8+8")
    + "\n\tbra end;\n"
    + wait("%r8+8", 0, "refill")
    + """
	st.shared.v4.u32 [%r9+-1024], {1, 1, 1, 1};
end:
""",
)

LITMUS += [
    Litmus(
        "a stage that is written again after a commit",
        STAGE,
        [
            (wait("%r8+8", 0, "refill"), "\nrefill:\n", "{1, 1, 1, 1}", "{0, 0, 0, 0}", BARRIER),
            (wait("%r8", 0, "product"), "", "tcgen05.mma", "{0, 0, 0, 0}", BARRIER),
        ],
        {"block": 96},
        "sm_100a",
    ),
    Litmus(
        "tcgen05 and tensor memory",
        TENSOR,
        [
            ("fence.proxy.async.shared::cta; // of the zeros", "", "// first", "st.shared.v4.u32 [%r9], {0",
             "fence.proxy.async"),
            ("tcgen05.wait::st.sync.aligned;", "", "// first", "tcgen05.st", "tcgen05.wait::st"),
            ("tcgen05.fence::before_thread_sync; // of st", "", "// first", "tcgen05.st",
             "tcgen05.fence::before_thread_sync"),
            ("tcgen05.fence::after_thread_sync; // of st", "", "// first", "tcgen05.st",
             "tcgen05.fence::after_thread_sync"),
            (wait("%r8", 0, "first"), "\nfirst:\n", "tcgen05.ld", "// first", ""),
            ("tcgen05.fence::after_thread_sync; // of the first", "", "tcgen05.ld", "// first",
             "tcgen05.fence::after_thread_sync"),
            ("tcgen05.wait::ld.sync.aligned;", "", "// second", "tcgen05.ld", "tcgen05.wait::ld"),
            ("tcgen05.fence::before_thread_sync; // of ld", "", "// second", "tcgen05.ld",
             "tcgen05.fence::before_thread_sync"),
            ("tcgen05.fence::after_thread_sync; // of ld", "", "// second", "tcgen05.ld",
             "tcgen05.fence::after_thread_sync"),
            ("fence.proxy.async.shared::cta; // of the operand", "", "// second", "// operand", "fence.proxy.async"),
            ("bar.sync 4;", "", "// second", "tcgen05.ld", "barrier"),
            ("tcgen05.fence::after_thread_sync; // of dealloc", "", "tcgen05.dealloc", "// second",
             "tcgen05.fence::after_thread_sync"),
        ],
        {"block": 128},
        "sm_100a",
    ),
]  # fmt: skip
