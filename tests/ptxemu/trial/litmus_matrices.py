"""Litmus tests of wgmma and tcgen05, as litmus.py has those of memory and copies."""

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
            ("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;", "{1, 1, 1, 1}", PRODUCT, "wgmma.wait_group"),
            ("bar.sync 1;", "", "{1, 1, 1, 1}", PRODUCT, "and a barrier for other threads"),
            ("wgmma.fence.sync.aligned;", "", PRODUCT, "", "wgmma.fence between the two"),
            ("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned;\n\tadd.f32 %f2, %f2, %f2;", PRODUCT, "add.f32 %f2", "wgmma.fence between"),
        ],
        {"block": 128},
    )
]  # fmt: skip

# tcgen05 on operands of zeros: a first product, its D read by all warps, then a second product over it.
TENSOR = (
    INIT.replace("COUNT", "1")
    + """
	shl.b32 %r9, %r1, 4; add.u32 %r9, %r2, %r9;
	st.shared.v4.u32 [%r9], {0, 0, 0, 0}; st.shared.v4.u32 [%r9+2048], {0, 0, 0, 0};
	and.b32 %r10, %r1, 96; setp.eq.u32 %p4, %r10, 32; @%p4 st.shared.v4.u32 [%r9+3584], {0, 0, 0, 0};
	fence.proxy.async.shared::cta;
	@%p2 bra allocated;
	tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r20], 32;
allocated:
	tcgen05.fence::before_thread_sync; // of alloc
	bar.sync 1;
	tcgen05.fence::after_thread_sync; // of alloc
	ld.shared.u32 %r11, [%r20];
	shr.u32 %r12, %r1, 5; shl.b32 %r12, %r12, 21; add.u32 %r13, %r11, %r12;
	tcgen05.st.sync.aligned.32x32b.x2.b32 [%r13], {%r1, %r1};
	tcgen05.wait::st.sync.aligned;
	tcgen05.fence::before_thread_sync; // of st
	bar.sync 2;
	setp.ne.u32 %p6, %r1, 32; @%p6 bra first;
	tcgen05.fence::after_thread_sync; // of st
	shr.u32 %r14, %r2, 4; cvt.u64.u32 %rd5, %r14; mov.b64 %rd4, 0x0000401000080000; or.b64 %rd5, %rd5, %rd4;
	add.s64 %rd6, %rd5, 256; mov.u32 %r15, IDESC; setp.eq.u32 %p5, %r1, %r1;
	tcgen05.mma.cta_group::1.kind::f16 [%r11], %rd5, %rd6, %r15, %p5; // first
	tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r8];
"""
    + wait("%r8", 0, "first")
    + """
	tcgen05.fence::after_thread_sync; // of the first
	tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r16, %r17}, [%r13];
	tcgen05.wait::ld.sync.aligned;
	st.shared.u32 [%r4], %r16; // operand
	fence.proxy.async.shared::cta; // of the operand
	tcgen05.fence::before_thread_sync; // of ld
	bar.sync 3;
	@%p6 bra second;
	tcgen05.fence::after_thread_sync; // of ld
	tcgen05.mma.cta_group::1.kind::f16 [%r11], %rd5, %rd6, %r15, %p5; // second
	tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r8];
"""
    + wait("%r8", 1, "second")
    + """
	bar.sync 4;
	@%p2 bra done;
	tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r11, 32;
done:
"""
).replace("IDESC", str(1 << 4 | 1 << 7 | 1 << 10 | (16 // 8) << 17 | (128 // 16) << 24))
LITMUS += [
    Litmus(
        "tcgen05 and tensor memory",
        TENSOR,
        [
            ("fence.proxy.async.shared::cta;\n\t@%p2", "@%p2", "// first", "st.shared.v4.u32 [%r9], {0", "fence.proxy.async"),
            ("tcgen05.wait::st.sync.aligned;", "", "// first", "tcgen05.st", "tcgen05.wait::st"),
            ("tcgen05.fence::before_thread_sync; // of st", "", "// first", "tcgen05.st", "tcgen05.fence::before_thread_sync"),
            ("tcgen05.fence::after_thread_sync; // of st", "", "// first", "tcgen05.st", "tcgen05.fence::after_thread_sync"),
            (wait("%r8", 0, "first"), "\nfirst:\n", "tcgen05.ld", "// first", ""),
            ("tcgen05.fence::after_thread_sync; // of the first", "", "tcgen05.ld", "// first", "tcgen05.fence::after_thread_sync"),
            ("tcgen05.wait::ld.sync.aligned;", "", "// second", "tcgen05.ld", "tcgen05.wait::ld"),
            ("tcgen05.fence::before_thread_sync; // of ld", "", "// second", "tcgen05.ld", "tcgen05.fence::before_thread_sync"),
            ("tcgen05.fence::after_thread_sync; // of ld", "", "// second", "tcgen05.ld", "tcgen05.fence::after_thread_sync"),
            ("fence.proxy.async.shared::cta; // of the operand", "", "// second", "// operand", "fence.proxy.async"),
            ("bar.sync 3;", "", "// second", "tcgen05.ld", "barrier"),
        ],
        {"block": 128},
        "sm_100a",
    )
]  # fmt: skip

# The same order by an mbarrier whose operations are relaxed: the fences of tcgen05 are enough for tcgen05.
RELAXED = (
    INIT.replace("COUNT", "32")
    + """
	@%p2 bra allocated;
	tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r20], 32;
allocated:
	bar.sync 1;
	ld.shared.u32 %r11, [%r20];
	@%p2 bra again;
	tcgen05.st.sync.aligned.32x32b.x2.b32 [%r11], {%r1, %r1};
	tcgen05.wait::st.sync.aligned;
	tcgen05.fence::before_thread_sync;
	mbarrier.arrive.relaxed.cluster.shared::cta.b64 %rd4, [%r8];
	bra multiplied;
"""
    + wait("%r8", 0, "again").replace("parity.", "parity.relaxed.cluster.")
    + """
	setp.ne.u32 %p6, %r1, 32; @%p6 bra multiplied;
	tcgen05.fence::after_thread_sync;
	shr.u32 %r14, %r2, 4; cvt.u64.u32 %rd5, %r14; mov.b64 %rd4, 0x0000401000080000; or.b64 %rd5, %rd5, %rd4;
	add.s64 %rd6, %rd5, 256; mov.u32 %r15, IDESC; setp.eq.u32 %p5, %r1, %r1;
	tcgen05.mma.cta_group::1.kind::f16 [%r11], %rd5, %rd6, %r15, %p5;
	tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r8+8];
multiplied:
"""
    + wait("%r8+8", 0, "end")
    + """
	bar.sync 2;
	@%p2 bra done;
	tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r11, 32;
done:
"""
).replace("IDESC", str(1 << 4 | 1 << 7 | 1 << 10 | (16 // 8) << 17 | (128 // 16) << 24))
LITMUS.insert(
    0,
    Litmus(
        "tcgen05 by a relaxed mbarrier",
        RELAXED,
        [
            ("tcgen05.fence::before_thread_sync;", "", "tcgen05.mma", "tcgen05.st", ""),
            ("tcgen05.fence::after_thread_sync;", "", "tcgen05.mma", "tcgen05.st", ""),
            ("tcgen05.wait::st.sync.aligned;", "", "tcgen05.mma", "tcgen05.st", ""),
        ],
        {"block": 64},
        "sm_100a",
    ),
)

# A stage that one warp writes, another's product reads, and a third writes again: what it knows of the first one's writes
# it knows by the commit alone.
STAGE = (
    INIT.replace("COUNT", "32")
    + """
	@%p2 bra allocated;
	tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r20], 32;
allocated:
	bar.sync 1;
	ld.shared.u32 %r11, [%r20];
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
    + """
	shr.u32 %r14, %r2, 4; cvt.u64.u32 %rd5, %r14; mov.b64 %rd4, 0x0000401000080000; or.b64 %rd5, %rd5, %rd4;
	add.s64 %rd6, %rd5, 256; mov.u32 %r15, IDESC; setp.ne.u32 %p5, %r1, %r1;
	tcgen05.mma.cta_group::1.kind::f16 [%r11], %rd5, %rd6, %r15, %p5;
	tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r8+8];
	bra end;
"""
    + wait("%r8+8", 0, "refill")
    + """
	st.shared.v4.u32 [%r9+-1024], {1, 1, 1, 1};
end:
	bar.sync 2;
	@%p2 bra done;
	tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r11, 32;
done:
"""
).replace("IDESC", str(1 << 4 | 1 << 7 | 1 << 10 | (16 // 8) << 17 | (128 // 16) << 24))
LITMUS.insert(
    0,
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
)
