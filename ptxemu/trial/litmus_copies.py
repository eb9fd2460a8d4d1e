"""Litmus tests of asynchronous copies; litmus.py has those of memory and barriers."""

from trial.litmus import INIT, Litmus, wait

LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.global.shared::cta.bulk_group"
WAIT_BYTES = "a wait for the phase of the mbarrier"

LITMUS = [
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
            ("fence.mbarrier_init.release.cluster;", "", f"{LOAD} [%r2]", "mbarrier.init",
             "fence.mbarrier_init or fence.proxy.async"),
            ("fence.mbarrier_init.release.cluster;", "fence.acq_rel.cta;", f"{LOAD} [%r2]", "mbarrier.init",
             "fence.mbarrier_init"),
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
            ("cp.async.wait_group 0;", "cp.async.wait_group 1;", "ld.shared.u32 %r10", "cp.async.ca",
             "a cp.async.wait_group"),
            ("bar.sync 0;", "", "ld.shared.u32 %r12", "cp.async.ca", "and a barrier for other threads"),
        ],
        {"block": 64},
    ),
    Litmus(
        "cp.async that arrives at an mbarrier",
        INIT.replace("COUNT", "32")
        + """
	@!%p2 bra again;
	sub.u32 %r9, %r1, 32; shl.b32 %r9, %r9, 4; add.u32 %r9, %r2, %r9; \
mul.wide.u32 %rd5, %r1, 16; add.s64 %rd6, %rd_a, %rd5;
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
            ("fence.proxy.async.shared::cta;", "fence.acq_rel.cta;", STORE, "st.shared.u32 [%r4], %r1",
             "fence.proxy.async"),
            ("bar.sync 0;", "", STORE, "st.shared.u32 [%r4], %r1", ""),
            ("cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group.read 1;", "st.shared.u32 [%r4], 7", STORE,
             "cp.async.bulk.wait_group.read"),
            ("bar.sync 1;", "", "st.shared.u32 [%r4], 7", STORE, ""),
            ("cp.async.bulk.wait_group 0;", "", "ld.global.u32 %r10", STORE, "cp.async.bulk.wait_group of its thread"),
        ],
        {"block": 64},
    ),
]  # fmt: skip
