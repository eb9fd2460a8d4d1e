"""Litmus tests of the checker of order: correctly ordered kernels, and edits that remove the order.

A body's edits are (text, replacement, reported line, earlier line, what the report names as missing). Lines are
identified by a part of their text.
"""

import dataclasses

START = """
	mov.u32 %r1, %tid.x; mov.u32 %r2, block; shl.b32 %r3, %r1, 2; add.u32 %r4, %r2, %r3; mov.u32 %r7, %ctaid.x;
	xor.b32 %r5, %r3, 4; add.u32 %r5, %r2, %r5; xor.b32 %r6, %r3, 128; add.u32 %r6, %r2, %r6; mov.u32 %r8, barrier;
	mul.wide.u32 %rd1, %r1, 4; add.s64 %rd2, %rd_o, %rd1; add.s64 %rd3, %rd_a, %rd1; setp.ne.u32 %p1, %r1, 0;
	setp.ge.u32 %p2, %r1, 32; setp.ne.u32 %p3, %r7, 0; mov.u32 %r20, place;
"""
SHARED = """
.shared .align 1024 .b8 block[4608];
.shared .align 8 .b8 barrier[32];
.shared .align 16 .b8 place[16];
"""


@dataclasses.dataclass(repr=False)
class Litmus:
    """A kernel of one launch (pointers a and o), what is left out in turn, and how it is launched."""

    name: str
    body: str
    edits: list
    options: dict = dataclasses.field(default_factory=dict)
    target: str = "sm_90a"

    def __repr__(self):
        return self.name


def wait(barrier, phase, label):
    return f"""
{label}:
	mbarrier.try_wait.parity.shared::cta.b64 %p9, [{barrier}], {phase};
	@!%p9 bra {label};
"""


INIT = """
	@%p1 bra ready;
	mbarrier.init.shared::cta.b64 [%r8], COUNT; mbarrier.init.shared::cta.b64 [%r8+8], 1;
	fence.mbarrier_init.release.cluster;
ready:
	bar.sync 0;
"""
BARRIER = "a barrier, or a release"

LITMUS = [
    Litmus(
        "a barrier of the cta",
        """
	st.shared.u32 [%r4], %r1;
	bar.sync 0;
	ld.shared.u32 %r10, [%r6];
	bar.sync 1;
	st.shared.u32 [%r4], %r10;
""",
        [
            ("bar.sync 0;", "", "ld.shared.u32 %r10", "st.shared.u32 [%r4], %r1", BARRIER),
            ("bar.sync 1;", "", "st.shared.u32 [%r4], %r10", "ld.shared.u32 %r10", BARRIER),
        ],
        {"block": 64},
    ),
    Litmus(
        "two readers and a writer",
        """
	shr.u32 %r9, %r1, 5; setp.eq.u32 %p4, %r9, 2; setp.eq.u32 %p5, %r9, 1;
	@%p4 bra writer;
	ld.shared.u32 %r10, [%r2];
	@%p5 bra second;
	bar.arrive 2, 64; bra done;
second:
	bar.arrive 3, 64; bra done;
writer:
	bar.sync 2, 64;
	bar.sync 3, 64;
	setp.eq.u32 %p6, %r1, 64; @!%p6 bra done;
	st.shared.u32 [%r2], 5;
done:
""",
        [
            ("bar.sync 2, 64;", "", "st.shared.u32 [%r2]", "ld.shared.u32 %r10", BARRIER),
            ("bar.sync 3, 64;", "", "st.shared.u32 [%r2]", "ld.shared.u32 %r10", BARRIER),
        ],
        {"block": 96},
    ),
    Litmus(
        "a barrier of the warp",
        """
	st.shared.u32 [%r4], %r1;
	bar.warp.sync -1;
	ld.shared.u32 %r10, [%r5];
""",
        [
            ("bar.warp.sync -1;", "shfl.sync.idx.b32 %r9, %r1, 0, 31, -1;", "ld.shared", "st.shared", BARRIER),
            ("bar.warp.sync -1;", "vote.sync.any.pred %p8, %p1, -1;", "ld.shared", "st.shared", BARRIER),
        ],
    ),
    Litmus(
        "bytes of one word",
        """
	add.u32 %r9, %r2, %r1;
	st.shared.u8 [%r9], %r1;
	mul.wide.u32 %rd5, %r1, 2; add.s64 %rd6, %rd_o, %rd5; cvt.u16.u32 %h1, %r1;
	st.global.u16 [%rd6], %h1;
""",
        [
            ("add.u32 %r9, %r2, %r1;", "shr.u32 %r9, %r1, 1; add.u32 %r9, %r2, %r9;", "st.shared.u8", "st.shared.u8",
             BARRIER),
            ("mul.wide.u32 %rd5, %r1, 2;", "and.b32 %r9, %r1, 30; mul.wide.u32 %rd5, %r9, 1;", "st.global.u16",
             "st.global.u16", BARRIER),
        ],
    ),
    Litmus(
        "release and acquire between ctas",
        """
	@%p3 bra second;
	st.global.u32 [%rd_o], 5;
	st.release.gpu.global.u32 [%rd_a], 1;
	bra done;
second:
	ld.acquire.gpu.global.u32 %r9, [%rd_a];
	setp.eq.u32 %p4, %r9, 0; @%p4 bra second;
	ld.global.u32 %r10, [%rd_o];
done:
""",
        [
            ("st.release.gpu", "st.relaxed.gpu", "ld.global.u32 %r10", "st.global.u32 [%rd_o]", BARRIER),
            ("ld.acquire.gpu", "ld.relaxed.gpu", "ld.global.u32 %r10", "st.global.u32 [%rd_o]", BARRIER),
            ("st.release.gpu", "st.release.cta", "ld.global.u32 %r10", "st.global.u32 [%rd_o]", BARRIER),
            ("ld.acquire.gpu", "ld.acquire.cta", "ld.acquire.cta", "st.release.gpu", BARRIER),
            ("ld.acquire.gpu", "ld.volatile", "ld.global.u32 %r10", "st.global.u32 [%rd_o]", BARRIER),
            ("st.release.gpu.global.u32", "st.global.u32", "ld.acquire.gpu", "st.global.u32 [%rd_a]",
             "(one of the two is not atomic)"),
        ],
        {"block": 1, "grid": 2},
    ),
    Litmus(
        "fences and volatile accesses between ctas",
        """
	@%p3 bra second;
	st.global.u32 [%rd_o], 5;
	membar.gl;
	st.volatile.global.u32 [%rd_a], 1;
	bra done;
second:
	ld.volatile.global.u32 %r9, [%rd_a];
	setp.eq.u32 %p4, %r9, 0; @%p4 bra second;
	fence.acq_rel.gpu;
	ld.global.u32 %r10, [%rd_o];
done:
""",
        [
            ("membar.gl;", "", "ld.global.u32 %r10", "st.global.u32 [%rd_o]", BARRIER),
            ("fence.acq_rel.gpu;", "", "ld.global.u32 %r10", "st.global.u32 [%rd_o]", BARRIER),
            ("fence.acq_rel.gpu;", "fence.acq_rel.cluster;", "ld.global.u32 %r10", "st.global.u32 [%rd_o]", BARRIER),
        ],
        {"block": 1, "grid": 2},
    ),
    Litmus(
        "a release passed on by an update",
        """
	setp.eq.u32 %p5, %r7, 2;
	@%p3 bra wait;
	st.global.u32 [%rd_o], 5;
	st.release.gpu.global.u32 [%rd_a], 1;
	bra done;
wait:
	ld.relaxed.gpu.global.u32 %r9, [%rd_a]; setp.ne.u32 %p6, %r9, %r7; @%p6 bra wait;
	@%p5 bra third;
	atom.relaxed.gpu.global.exch.b32 %r9, [%rd_a], 2;
	bra done;
third:
	ld.acquire.gpu.global.u32 %r9, [%rd_a];
	ld.global.u32 %r10, [%rd_o];
done:
""",
        [("atom.relaxed.gpu.global.exch.b32 %r9, [%rd_a], 2", "st.relaxed.gpu.global.u32 [%rd_a], 2",
          "ld.global.u32 %r10", "st.global.u32 [%rd_o]", BARRIER)],
        {"block": 1, "grid": 3},
    ),
    Litmus(
        "the last cta to arrive reads what all have written",
        """
	mad.lo.u32 %r9, %r7, 64, %r1; mul.wide.u32 %rd5, %r9, 4; add.s64 %rd6, %rd_o, %rd5;
	st.global.u32 [%rd6], %r9;
	bar.sync 0;
	@%p1 bra counted;
	atom.acq_rel.gpu.global.add.u32 %r10, [%rd_a], 1;
	st.shared.u32 [%r2], %r10;
counted:
	bar.sync 1;
	ld.shared.u32 %r11, [%r2]; setp.ne.u32 %p4, %r11, 2; @%p4 bra done;
	ld.global.u32 %r12, [%rd2]; ld.global.u32 %r13, [%rd2+256];
	ld.global.u32 %r14, [%rd2+512];
done:
""",
        [
            ("atom.acq_rel.gpu", "atom.acquire.gpu", "ld.global.u32 %r12", "st.global.u32 [%rd6]", BARRIER),
            ("atom.acq_rel.gpu", "atom.release.gpu", "ld.global.u32 %r12", "st.global.u32 [%rd6]", BARRIER),
            ("bar.sync 0;", "", "ld.global.u32 %r12", "st.global.u32 [%rd6]", BARRIER),
            ("bar.sync 1;", "bar.warp.sync -1;", "ld.shared.u32 %r11", "st.shared.u32 [%r2]", BARRIER),
        ],
        {"block": 64, "grid": 3},
    ),
    Litmus(
        "atomics in shared memory",
        """
	@%p1 bra zeroed;
	st.shared.u32 [%r2], 0;
zeroed:
	bar.sync 0;
	atom.shared.add.u32 %r9, [%r2], 1;
	bar.sync 1;
	ld.shared.u32 %r10, [%r2];
""",
        [
            ("bar.sync 0;", "", "atom.shared", "st.shared.u32 [%r2], 0", "(one of the two is not atomic)"),
            ("bar.sync 1;", "", "ld.shared.u32 %r10", "atom.shared", "(one of the two is not atomic)"),
            ("bar.sync 1;\n\tld.shared.u32", "ld.shared.u8", "ld.shared.u8", "atom.shared",
             "(one of the two is not atomic)"),
        ],
        {"block": 64},
    ),
    Litmus(
        "loads that are not coherent",
        """
	st.global.u32 [%rd2], %r1;
	bar.sync 0;
	ld.global.u32 %r10, [%rd2];
""",
        [("ld.global.u32 %r10", "ld.global.nc.u32 %r10", "ld.global.nc", "st.global", "a load without .nc")],
        {"block": 64},
    ),
    Litmus(
        "an mbarrier of threads",
        INIT.replace("COUNT", "32")
        + """
	@!%p2 bra again;
	st.shared.u32 [%r4], %r1;
	mbarrier.arrive.shared::cta.b64 %rd4, [%r8];
	bra done;
"""
        + wait("%r8", 0, "again")
        + """
	ld.shared.u32 %r10, [%r6];
done:
""",
        [
            ("mbarrier.arrive.shared::cta", "mbarrier.arrive.relaxed.cta.shared::cta", "ld.shared", "st.shared",
             BARRIER),
            ("mbarrier.try_wait.parity", "mbarrier.try_wait.parity.relaxed.cta", "ld.shared", "st.shared", BARRIER),
            ("[%r8], 0;\n\t@!%p9", "[%r8], 1;\n\t@!%p9", "st.shared", "ld.shared", BARRIER),
            ("bar.sync 0;", "", "mbarrier.try_wait", "mbarrier.init",
             "an mbarrier is used without an order after its init"),
        ],
        {"block": 64},
    ),
    Litmus(
        "a barrier of the cluster",
        """
	st.shared.u32 [%r4], %r7;
	barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
	xor.b32 %r9, %r7, 1; mapa.shared::cluster.u32 %r10, %r4, %r9;
	ld.shared::cluster.u32 %r11, [%r10];
	barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
""",
        [
            ("barrier.cluster.arrive.release;", "barrier.cluster.arrive.relaxed;", "ld.shared::cluster",
             "st.shared.u32", BARRIER),
            ("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;", "bar.sync 0;", "ld.shared::cluster",
             "st.shared.u32", BARRIER),
        ],
        {"grid": 2, "cluster": 2},
    ),
]  # fmt: skip
