"""Kernels in which an order is made, and edits that leave it out: litmus tests of the checker of order.

A body's edits are (what is replaced, by what, the line that is reported, the line before it, what is said to be missing).
Lines are named by a part of their text.
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
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.global.shared::cta.bulk_group"
BARRIER, WAIT_BYTES = "a barrier, or a release", "a wait for the phase of the mbarrier"

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
        "a named barrier",
        """
	@%p2 bra first;
	bar.sync 3, 64;
	ld.shared.u32 %r10, [%r6];
	bra done;
first:
	st.shared.u32 [%r4], %r1;
	bar.arrive 3, 64;
done:
""",
        [("bar.sync 3, 64;", "bar.arrive 3, 64;", "st.shared.u32 [%r4]", "ld.shared.u32 %r10", BARRIER)],
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
            ("add.u32 %r9, %r2, %r1;", "shr.u32 %r9, %r1, 1; add.u32 %r9, %r2, %r9;", "st.shared.u8", "st.shared.u8", BARRIER),
            ("mul.wide.u32 %rd5, %r1, 2;", "and.b32 %r9, %r1, 30; mul.wide.u32 %rd5, %r9, 1;", "st.global.u16", "st.global.u16", BARRIER),
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
            ("ld.acquire.gpu", "ld.volatile", "ld.global.u32 %r10", "st.global.u32 [%rd_o]", BARRIER),
            ("st.release.gpu.global.u32", "st.global.u32", "ld.acquire.gpu", "st.global.u32 [%rd_a]", "(one of the two is not atomic)"),
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
            ("membar.gl;", "membar.cta;", "ld.global.u32 %r10", "st.global.u32 [%rd_o]", BARRIER),
            ("fence.acq_rel.gpu;", "", "ld.global.u32 %r10", "st.global.u32 [%rd_o]", BARRIER),
            ("fence.acq_rel.gpu;", "fence.acq_rel.cluster;", "ld.global.u32 %r10", "st.global.u32 [%rd_o]", BARRIER),
        ],
        {"block": 1, "grid": 2},
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
            ("atom.acq_rel.gpu", "atom.relaxed.gpu", "ld.global.u32 %r12", "st.global.u32 [%rd6]", BARRIER),
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
            ("mbarrier.arrive.shared::cta", "mbarrier.arrive.relaxed.cta.shared::cta", "ld.shared", "st.shared", BARRIER),
            ("mbarrier.try_wait.parity", "mbarrier.try_wait.parity.relaxed.cta", "ld.shared", "st.shared", BARRIER),
            ("[%r8], 0;\n\t@!%p9", "[%r8], 1;\n\t@!%p9", "st.shared", "ld.shared", BARRIER),
            ("bar.sync 0;", "", "mbarrier.try_wait", "mbarrier.init", "an mbarrier is used without an order after its init"),
        ],
        {"block": 64},
    ),
    Litmus(
        "a bulk copy and its bytes",
        INIT.replace("COUNT", "1")
        + f"""
	@%p1 bra again;
	mbarrier.arrive.expect_tx.shared::cta.b64 %rd4, [%r8], 256;
	{LOAD} [%r2], [%rd_a], 128, [%r8];
	add.u32 %r9, %r2, 128; add.s64 %rd6, %rd_a, 128;
	{LOAD} [%r9], [%rd6], 128, [%r8];
"""
        + wait("%r8", 0, "again")
        + """
	ld.shared.u32 %r10, [%r4+128];
""",
        [
            (wait("%r8", 0, "again"), "\nagain:\n", "ld.shared", f"{LOAD} [%r9]", ""),
            ("[%r8], 256;", "[%r8], 128;", "ld.shared", f"{LOAD} [%r9]", WAIT_BYTES),
            ("fence.mbarrier_init.release.cluster;", "", f"{LOAD} [%r2]", "mbarrier.init", "fence.mbarrier_init or fence.proxy.async"),
            ("fence.mbarrier_init.release.cluster;", "fence.acq_rel.cta;", f"{LOAD} [%r2]", "mbarrier.init", "fence.mbarrier_init"),
        ],
    ),
    Litmus(
        "a stage that is filled again",
        INIT.replace("COUNT", "1").replace("[%r8+8], 1", "[%r8+8], 32")
        + f"""
	@!%p2 bra consumer;
	setp.ne.u32 %p4, %r1, 32; @%p4 bra done;
	mbarrier.arrive.expect_tx.shared::cta.b64 %rd4, [%r8], 128;
	{LOAD} [%r2], [%rd_a], 128, [%r8];
"""
        + wait("%r8+8", 0, "empty")
        + f"""
	mbarrier.arrive.expect_tx.shared::cta.b64 %rd4, [%r8], 128;
	{LOAD} [%r2], [%rd_a], 128, [%r8]; // again
	bra done;
consumer:
"""
        + wait("%r8", 0, "full")
        + """
	ld.shared.u32 %r10, [%r4];
	mbarrier.arrive.shared::cta.b64 %rd4, [%r8+8];
"""
        + wait("%r8", 1, "second")
        + """
	ld.shared.u32 %r11, [%r4];
done:
""",
        [
            ("[%r8+8], 0;\n\t@!%p9", "[%r8+8], 1;\n\t@!%p9", "// again", f"{LOAD} [%r2], [%rd_a], 128, [%r8];", ""),
            (
                "ld.shared.u32 %r10, [%r4];\n\tmbarrier.arrive.shared::cta.b64 %rd4, [%r8+8];",
                "mbarrier.arrive.shared::cta.b64 %rd4, [%r8+8];\n\tld.shared.u32 %r10, [%r4];",
                "// again", "ld.shared.u32 %r10", "",
            ),
            ("[%r8], 1;\n\t@!%p9", "[%r8], 0;\n\t@!%p9", "ld.shared.u32 %r11", "// again", ""),
        ],
        {"block": 64},
    ),
    Litmus(
        "cp.async and its wait",
        """
	shl.b32 %r9, %r1, 4; add.u32 %r9, %r2, %r9; mul.wide.u32 %rd5, %r1, 16; add.s64 %rd6, %rd_a, %rd5;
	cp.async.ca.shared.global [%r9], [%rd6], 16; cp.async.commit_group;
	cp.async.wait_group 0;
	ld.shared.u32 %r10, [%r9];
	bar.sync 0;
	xor.b32 %r11, %r9, 512;
	ld.shared.u32 %r12, [%r11];
""",
        [
            ("cp.async.wait_group 0;", "cp.async.wait_group 1;", "ld.shared.u32 %r10", "cp.async.ca", "a cp.async.wait_group"),
            ("bar.sync 0;", "", "ld.shared.u32 %r12", "cp.async.ca", "and a barrier for other threads"),
        ],
        {"block": 64},
    ),
    Litmus(
        "cp.async that arrives at an mbarrier",
        INIT.replace("COUNT", "32")
        + """
	@!%p2 bra again;
	sub.u32 %r9, %r1, 32; shl.b32 %r9, %r9, 4; add.u32 %r9, %r2, %r9; mul.wide.u32 %rd5, %r1, 16; add.s64 %rd6, %rd_a, %rd5;
	cp.async.cg.shared.global [%r9], [%rd6], 16;
	cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r8];
	bra done;
"""
        + wait("%r8", 0, "again")
        + """
	ld.shared.u32 %r10, [%r4];
done:
""",
        [
            ("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r8]", "mbarrier.arrive.shared::cta.b64 %rd7, [%r8]",
             "ld.shared.u32 %r10", "cp.async.cg", "a cp.async.wait_group (or mbarrier)"),
        ],
        {"block": 64},
    ),
    Litmus(
        "a bulk store and its source",
        f"""
	st.shared.u32 [%r4], %r1;
	fence.proxy.async.shared::cta;
	bar.sync 0;
	@%p1 bra stored;
	{STORE} [%rd_o], [%r2], 256;
	cp.async.bulk.commit_group;
	cp.async.bulk.wait_group.read 0;
stored:
	bar.sync 1;
	st.shared.u32 [%r4], 7;
	@%p1 bra done;
	cp.async.bulk.wait_group 0;
	ld.global.u32 %r10, [%rd_o];
done:
""",
        [
            ("fence.proxy.async.shared::cta;", "", STORE, "st.shared.u32 [%r4], %r1", "fence.proxy.async"),
            ("fence.proxy.async.shared::cta;", "fence.acq_rel.cta;", STORE, "st.shared.u32 [%r4], %r1", "fence.proxy.async"),
            ("bar.sync 0;", "", STORE, "st.shared.u32 [%r4], %r1", ""),
            ("cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group.read 1;", "st.shared.u32 [%r4], 7", STORE, "cp.async.bulk.wait_group.read"),
            ("bar.sync 1;", "", "st.shared.u32 [%r4], 7", STORE, ""),
            ("cp.async.bulk.wait_group 0;", "", "ld.global.u32 %r10", STORE, "cp.async.bulk.wait_group of its thread"),
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
            ("barrier.cluster.arrive.release;", "barrier.cluster.arrive.relaxed;", "ld.shared::cluster", "st.shared.u32", BARRIER),
            ("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;", "bar.sync 0;", "ld.shared::cluster", "st.shared.u32", BARRIER),
        ],
        {"grid": 2, "cluster": 2},
    ),
]  # fmt: skip
