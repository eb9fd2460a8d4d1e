"""Faults planted in the project's kernels, as edits of their PTX, and the test that should detect each.

python kernel_faults.py NAME KERNEL FILE edits the kernel in place. test_kernel_faults.py passes this command to the
emulator as PTXEMU_EDIT, which runs it when a kernel is first launched. Standard library only.
"""

import dataclasses
import pathlib
import re
import sys

WAIT = r"mbarrier\.try_wait\.parity\.shared::cta\.b64 p, \[%r\d+\], %r\d+;"
PASSED = "setp.eq.u32 p, 0, 0;"
EXPECT = r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, (\[%r\d+\]), (%r\d+);"


@dataclasses.dataclass
class Edit:
    """Replaces matches of a pattern in a kernel's text: all, one (`which`, from 0; -1 is the last), or a slice."""

    pattern: str
    by: str
    which: int | slice | None = None


@dataclasses.dataclass
class Fault:
    """`kernels` is a pattern of names. `order`: the checker of order must detect it, else the test's own values."""

    name: str
    what: str
    kernels: str
    edits: list
    test: str
    order: bool = True
    multiprocessors: int = 8  # fewer of them give each CTA more work tiles


PLAIN = "8.0 test_cuda CudaLayer.RunsReplacesAndUnpacks"
STEPS80 = "8.0 test_steps Backends/Steps.*EveryStep/cuda"
FP8_WEIGHTS = "8.0 test_layer Backends/LinearOfBackend.EveryFp8Weight/cuda"
SM90 = "9.0 test_cuda Sm90SmallLayer.ARunIsItsSteps"
DECODE90 = "9.0 test_cuda Sm90SmallDecode.EveryKindOfLayer"
SM120 = "12.0 test_cuda Backends/Fp4Layer.BothGemmsOfARunSplitTheirTiles/sm120"
RUN120 = "12.0 test_cuda Backends/Fp4Layer.ARunIsItsSteps/sm120"
SPLIT100 = "10.0 test_cuda Backends/Fp4Layer.BothGemmsOfARunSplitTheirTiles/sm100"
TILES100 = "10.0 test_cuda Backends/Fp4Layer.NarrowTilesFollowEachOther/sm100"
CHECK100 = "10.0 test_cuda Backends/SelfCheck.RightKernelsPass/sm100"
CHECK120 = "12.0 test_cuda Backends/SelfCheck.RightKernelsPass/sm120"
GEMM100, GEMM100_1, BF100 = "sm100_gemm[12]_kernelILm0E", "sm100_gemm1_kernelILm0E", "sm100_bf16_gemm1_kernelILm0E"
# The waits of sm100's roles, in the order of the PTX. The last one exists only under bf16 activations.
FACTORS, ACCUMULATORS, WORK, EMPTY, MULTIPLIED_ROWS, FULL, GATHERED_ROWS, GATHERED_EMPTY, DEQUANTIZED = range(9)
BEFORE, AFTER = r"tcgen05\.fence::before_thread_sync;", r"tcgen05\.fence::after_thread_sync;"
COMMIT = r"tcgen05\.commit\.cta_group::1\.mbarrier::arrive::one\.shared::cluster\.b64 (\[%r\d+\]);"
ADDS = r"setp\.ne\.u32 p, %r\d+, 0;(?=\s*tcgen05\.mma)"
GEMM120, GEMM90 = "sm120_gemm[12]_kernel", "sm90_gemm[12]_kernelILm0ENS1_12GatheredRows"
DECODE = r"sm90_decode_kernelI\w*Gemm1FunctionE0EE"
GEMM80 = r"plain.*gemm(1_swiglu|2)_kernel"
RELEASE = r"bar\.warp\.sync -1;(?=\n@%p\d+ bra [^\n]*\nadd\.s32 %r\d+, %r\d+, \d+;\s*mbarrier\.arrive)"
PHASE = r"(mbarrier\.try_wait\.parity\.shared::cta\.b64 p, \[%r\d+\]), (%r\d+);"
OTHER_PHASE = r"{ .reg .b32 other; xor.b32 other, \2, 1; \1, other; }"
COPIED = r"cp\.async\.mbarrier\.arrive\.noinc\.shared::cta\.b64 (\[%r\d+\]);"
ARRIVES = r"mbarrier.arrive.shared::cta.b64 _, \1;"
LOAD = r"(tcgen05\.ld\.sync\.aligned\.16x256b\.x1\.b32 \{[^}]*\}), \[(%r\d+)\];"
MMA = r"(tcgen05\.mma[^;]*block16 [^;]*), \[(%r\d+)\], (\[%r\d+\], p);"
NEXT_SCALES = r"{ .reg .b32 next; add.u32 next, \2, 4; \1, [next], \3; }"


def fewer(size):
    """An expect_tx of that many bytes too few."""
    return Edit(
        EXPECT,
        rf"{{ .reg .b32 less; sub.u32 less, \2, {size}; mbarrier.arrive.expect_tx.shared::cta.b64 _, \1, less; }}",
    )


def other_lanes(bits):
    """A tcgen05.ld of other lanes: these bits of its address are flipped."""
    return Edit(LOAD, rf"{{ .reg .b32 other; xor.b32 other, \2, {bits}; \1, [other]; }}")


FAULTS = [
    # ---- stages
    Fault("full_not_awaited", "consumers do not wait for a stage's bytes", GEMM120, [Edit(WAIT, PASSED, 3)], SM120),
    Fault("empty_not_awaited", "the producer does not wait for a stage to be free", GEMM120, [Edit(WAIT, PASSED, 1)], SM120),
    Fault("rows_not_awaited", "consumers do not wait for a work tile's rows", GEMM120, [Edit(WAIT, PASSED, 2)], SM120),
    Fault("alphas_not_awaited", "consumers do not wait for a work tile's alphas", GEMM120, [Edit(WAIT, PASSED, 4)], SM120),
    Fault("work_not_awaited", "the producer overwrites what it told of a work tile", GEMM120, [Edit(WAIT, PASSED, 0)], RUN120, multiprocessors=1),
    Fault("released_by_one_lane", "a warp's first lane releases the stage before the others have read it", GEMM120, [Edit(RELEASE, "")], SM120),
    Fault("expects_too_few_bytes", "a stage's phase ends one row too early", GEMM120, [fewer(144)], SM120),
    Fault("wrong_phase", "consumers wait for the phase before", GEMM120, [Edit(PHASE, OTHER_PHASE, 3)], SM120),
    Fault("barriers_unfenced", "no fence between mbarrier.init and the copies that complete there", GEMM120, [Edit(r"fence\.mbarrier_init\.release\.cluster;|fence\.proxy\.async\.shared::cta;", "")], SM120),
    # ---- split-K
    Fault("counter_relaxed", "the counter of a tile's splits neither releases nor acquires", GEMM120, [Edit(r"atom\.acq_rel\.gpu", "atom.relaxed.gpu")], SM120),
    Fault("counter_of_cta_scope", "the counter of a tile's splits orders within a cta alone", GEMM120, [Edit(r"atom\.acq_rel\.gpu", "atom.acq_rel.cta")], SM120),
    Fault("counted_before_stored", "no barrier between the warps' partials and their cta's count", GEMM120, [Edit(r"bar\.sync %r\d+, 256;", "", 0)], SM120),
    Fault("reduced_before_told", "no barrier between the thread that counts and those that reduce", GEMM120, [Edit(r"bar\.sync %r\d+, 256;", "", 1)], SM120),
    # ---- dependent launches
    Fault("rows_before_the_kernel_before", "the producer reads rows that the launch before still writes", GEMM120, [Edit(r"griddepcontrol\.wait;", "", 1)], SM120),
    Fault("stores_before_the_kernel_before", "consumers do not wait for the launch before", GEMM120, [Edit(r"griddepcontrol\.wait;", "", -1)], SM120),
    Fault("combines_early", "combine reads rows that gemm2 still writes", "combine_tokens", [Edit(r"griddepcontrol\.wait;", "")], SM120),
    # ---- Hopper
    Fault("wgmma_without_proxy_fence", "cp.async's rows are read by wgmma without a proxy fence", GEMM90, [Edit(r"fence\.proxy\.async\.shared::cta;", "", slice(1, None))], SM90),
    Fault("wgmma_without_fence", "fragments are written and multiplied without wgmma.fence", GEMM90, [Edit(r"wgmma\.fence\.sync\.aligned;", "")], SM90),
    Fault("wgmma_not_awaited", "accumulators and stages are used before the products are done", GEMM90, [Edit(r"wgmma\.wait_group\.sync\.aligned 0;", "wgmma.wait_group.sync.aligned 1;")], SM90, False),
    Fault("copies_arrive_at_once", "a thread arrives for its cp.async before they are done", GEMM90, [Edit(COPIED, ARRIVES)], SM90),
    Fault("decode_copy_not_awaited", "a warp reads a subtile before its copy is done", DECODE, [Edit(r"cp\.async\.wait_group 3;", "cp.async.wait_group 4;")], DECODE90),
    Fault("decode_scales_not_synchronized", "a lane reads scales that another lane has copied", DECODE, [Edit(r"(cp\.async\.wait_group 3;[^;]*?)bar\.warp\.sync\s+-1;", r"\1")], DECODE90),
    Fault("decode_grid_not_awaited", "a cta reads the intermediate before all ctas have stored it", DECODE, [Edit(r"(ld\.acquire\.gpu\.global\.u32 %r\d+, \[%rd\d+\];[^@]*?)setp\.gt\.s32\s+(%p\d+), %r\d+, -1;", r"\1setp.ne.s32 \2, 0, 0;")], DECODE90),
    Fault("tokens_unsynchronized", "row threads read tokens that others still write", GEMM90, [Edit(r"bar\.sync %r\d+, 96;|bar\.sync \d+, 96;", "")], SM90),
    # ---- plain GEMMs
    Fault("copies_not_awaited", "a stage of cp.async more may be under way", GEMM80, [Edit(r"cp\.async\.wait_group \d+;", "cp.async.wait_group 3;")], PLAIN),
    Fault("buffers_unsynchronized", "no barrier between a stage's copies and its readers", GEMM80, [Edit(r"(cp\.async\.wait_group \d+;[^;]*?)bar\.sync 0;", r"\1")], PLAIN),
    Fault("sources_unsynchronized", "rows' sources are read while others write them", GEMM80, [Edit(r"bar\.sync 0;", "", 0)], PLAIN),
    # ---- values
    Fault("clamped_above_alone", "up is not clamped from below", "plain.*gemm1_swiglu_kernel", [Edit(r"setp\.lt\.f32 (%p\d+), %f\d+, (%f\d+);(?=\nselp\.f32 %f\d+, \2, %f\d+, \1;)", r"setp.ne.u32 \1, 0, 0;")], STEPS80, False),
    Fault("other_half_of_scales", "A's scales of the second half are those of the first", GEMM120, [Edit(r"\+8256\]", "+8192]")], SM120, False),
    Fault("gate_times_alpha_of_up", "gate and up exchange their alphas", "sm120_gemm1_kernel", [Edit(r"ld\.shared\.v4\.f32 \{(%f\d+), (%f\d+), (%f\d+), (%f\d+)\}", r"ld.shared.v4.f32 {\2, \1, \3, \4}")], SM120, False),
    Fault("sigmoid_of_minus_gate", "SwiGLU's exponent has the other sign", "sm120_gemm1_kernel", [Edit(r"ex2\.approx\.ftz\.f32 (%f\d+), (%f\d+);", r"neg.f32 \2, \2; ex2.approx.ftz.f32 \1, \2;")], SM120, False),
    Fault("small_weights_as_normal", "weights that E4M3 holds as subnormal numbers are rounded as normal ones", r"plain.*gemm(1_swiglu|2)_kernelILi\d+ELb1", [Edit(r"\b1015037056\b", "0")], FP8_WEIGHTS, False),
    Fault("halves_of_rows", "B's fragments exchange their halves of k", GEMM80, [Edit(r"(mma\.sync\.aligned\.m16n8k16[^;]*\}, \{)(%r\d+),(%r\d+)\}", r"\1\3,\2}")], STEPS80, False),
    # ---- tcgen05
    Fault("tensor_factors_not_awaited", "the epilogue does not wait for a tile's alphas", GEMM100_1, [Edit(WAIT, PASSED, FACTORS)], TILES100, multiprocessors=1),
    Fault("accumulators_not_awaited", "the epilogue does not wait for a tile's products", GEMM100_1, [Edit(WAIT, PASSED, ACCUMULATORS)], TILES100, multiprocessors=1),
    Fault("tensor_work_not_awaited", "what was told of a work tile is overwritten", GEMM100_1, [Edit(WAIT, PASSED, WORK)], TILES100, multiprocessors=1),
    Fault("weights_into_full_stage", "weights are copied into a stage that is not free", GEMM100_1, [Edit(WAIT, PASSED, EMPTY)], TILES100, multiprocessors=1),
    Fault("multiplied_without_rows", "the multiplying thread does not wait for a work tile's rows", GEMM100_1, [Edit(WAIT, PASSED, MULTIPLIED_ROWS)], TILES100, multiprocessors=1),
    Fault("tensor_full_not_awaited", "the multiplying thread does not wait for a stage", GEMM100_1, [Edit(WAIT, PASSED, FULL)], TILES100, multiprocessors=1),
    Fault("gathered_without_rows", "gathering threads do not wait for a work tile's rows", GEMM100_1, [Edit(WAIT, PASSED, GATHERED_ROWS)], TILES100, multiprocessors=1),
    Fault("rows_into_full_stage", "rows are copied into a stage that is not free", GEMM100_1, [Edit(WAIT, PASSED, GATHERED_EMPTY)], TILES100, multiprocessors=1),
    Fault("tensor_wrong_phase", "the multiplying thread waits for the phase before", GEMM100_1, [Edit(PHASE, OTHER_PHASE, FULL)], TILES100, multiprocessors=1),
    Fault("stage_freed_at_once", "a stage is free when its products are issued, not when they are done", GEMM100_1, [Edit(COMMIT, ARRIVES, 0)], TILES100, multiprocessors=1),
    Fault("tile_told_at_once", "a tile is there when its products are issued, not when they are done", GEMM100_1, [Edit(COMMIT, ARRIVES, 1)], TILES100, multiprocessors=1),
    Fault("rows_without_proxy_fence", "rows of cp.async are multiplied without a proxy fence", GEMM100_1, [Edit(r"fence\.proxy\.async\.shared::cta;", "", 1)], TILES100, multiprocessors=1),
    Fault("stored_without_fence", "no tcgen05.fence between tcgen05.ld and the arrival that frees accumulators", GEMM100_1, [Edit(BEFORE, "", 1)], TILES100, multiprocessors=1),
    Fault("multiplied_without_fence", "no tcgen05.fence between the wait for free accumulators and products", GEMM100_1, [Edit(AFTER, "", slice(2, 4))], TILES100, multiprocessors=1),
    Fault("loaded_without_fence", "no tcgen05.fence between the wait for products and tcgen05.ld", GEMM100_1, [Edit(AFTER, "", 1)], TILES100, multiprocessors=1),
    Fault("given_back_without_fence", "no tcgen05.fence after the barrier before tensor memory is given back", GEMM100_1, [Edit(AFTER, "", -1)], TILES100, multiprocessors=1),
    Fault("tensor_barriers_unfenced", "no fence between mbarrier.init and the copies that complete there", GEMM100_1, [Edit(r"fence\.mbarrier_init\.release\.cluster;", ""), Edit(r"fence\.proxy\.async\.shared::cta;", "", 0)], TILES100, multiprocessors=1),
    Fault("tensor_bytes_too_few", "a stage's phase ends before its last 512 bytes", GEMM100_1, [fewer(512)], TILES100, multiprocessors=1),
    Fault("gathered_at_once", "a gathering thread arrives for its cp.async before they are done", GEMM100_1, [Edit(COPIED, ARRIVES)], TILES100, multiprocessors=1),
    Fault("tensor_rows_before_the_kernel_before", "rows are gathered that the launch before still writes", GEMM100, [Edit(r"griddepcontrol\.wait;", "", 2)], SPLIT100, multiprocessors=3),
    Fault("tensor_stores_before_the_kernel_before", "the epilogue does not wait for the launch before", GEMM100, [Edit(r"griddepcontrol\.wait;", "", 1)], SPLIT100, multiprocessors=3),
    Fault("tensor_counted_before_stored", "no barrier between the warps' partials and their cta's count", GEMM100, [Edit(r"bar\.sync %r\d+, 128;", "", 0)], SPLIT100, multiprocessors=3),
    Fault("tensor_reduced_before_told", "no barrier between the thread that counts and those that reduce", GEMM100, [Edit(r"bar\.sync %r\d+, 128;", "", 1)], SPLIT100, multiprocessors=3),
    Fault("tensor_loads_not_awaited", "registers of tcgen05.ld are used before wait::ld", GEMM100_1, [Edit(r"tcgen05\.wait::ld\.sync\.aligned;", "")], TILES100, False),
    Fault("too_few_columns", "32 columns of tensor memory where 128 are used", GEMM100_1, [Edit(r"(tcgen05\.(?:alloc|dealloc)[^;]*), 128;", r"\1, 32;")], TILES100, False),
    Fault("columns_kept", "tensor memory is not given back", GEMM100_1, [Edit(r"tcgen05\.dealloc[^;]*;", "")], TILES100, False),
    Fault("lanes_of_the_next_warp", "a warp of the epilogue reads another's lanes", GEMM100_1, [other_lanes("0x200000")], TILES100, False),
    Fault("lanes_exchanged", "the two groups of 16 weight rows of a warp are exchanged", GEMM100_1, [other_lanes("0x100000")], TILES100, False),
    Fault("scales_of_the_next_step", "a step's weights are multiplied under the scales of the next one's", GEMM100_1, [Edit(MMA, NEXT_SCALES, 0)], TILES100, False),
    Fault("scales_exchanged", "weights and rows exchange their scales", GEMM100_1, [Edit(r"(tcgen05\.mma[^;]*block16 [^;]*), (\[%r\d+\]), (\[%r\d+\]), p;", r"\1, \3, \2, p;")], TILES100, False),
    Fault("sum_of_the_tile_before", "a tile's first product adds to what stood in its accumulators", GEMM100_1, [Edit(ADDS, "setp.eq.u32 p, 0, 0;", 0)], TILES100, False),
    Fault("sum_begins_again", "a step's product does not add to those before", GEMM100_1, [Edit(ADDS, "setp.ne.u32 p, 0, 0;", 1)], TILES100, False),
    Fault("weights_in_the_other_swizzle", "weights are read in the 128-byte swizzle", GEMM100_1, [Edit("-9223301530671644672", "4611756524610519040")], TILES100, False),
    Fault("tensor_gate_times_alpha_of_up", "gate and up exchange their alphas", GEMM100_1, [Edit(r"ld\.shared\.v4\.f32\s+\{(%f\d+), (%f\d+), (%f\d+), (%f\d+)\}", r"ld.shared.v4.f32 {\2, \1, \3, \4}")], TILES100, False),
    # ---- the same under bf16 activations
    Fault("dequantized_before_full", "a stage's weights are dequantized before they are there", BF100, [Edit(WAIT, PASSED, DEQUANTIZED)], TILES100, multiprocessors=1),
    Fault("multiplied_before_dequantized", "a stage is multiplied before its weights are dequantized", BF100, [Edit(WAIT, PASSED, FULL)], TILES100, multiprocessors=1),
    Fault("bf16_rows_into_full_stage", "rows are copied into a stage that is not free", BF100, [Edit(WAIT, PASSED, GATHERED_EMPTY)], TILES100, multiprocessors=1),
    Fault("bf16_stage_freed_at_once", "a stage is free when its products are issued, not when they are done", BF100, [Edit(COMMIT, ARRIVES, 0)], TILES100, multiprocessors=1),
    Fault("dequantized_without_proxy_fences", "neither who dequantizes nor who multiplies has a proxy fence", BF100, [Edit(r"fence\.proxy\.async\.shared::cta;", "", slice(1, None))], TILES100, multiprocessors=1),
    Fault("dequantized_without_proxy_fence", "who dequantizes has no proxy fence", BF100, [Edit(r"fence\.proxy\.async\.shared::cta;", "", -1)], TILES100, multiprocessors=1),
    Fault("scales_twice_as_large", "a block scale as bf16 has one exponent more", BF100, [Edit("14976", "15104")], TILES100, False),
    Fault("half_of_a_k_block", "the second half of a k-block begins the sum again", BF100, [Edit(ADDS, "setp.ne.u32 p, 0, 0;", 4)], TILES100, False),
    Fault("real_values_beyond_k", "rows are not filled with zeros beyond K", BF100, [Edit(r"(@p cp\.async\.cg\.shared\.global \[%r\d+\], \[%rd\d+\], 16), %r\d+;", r"\1, 16;")], TILES100, False),
    # ---- the widest gemm2, which the self-check must see
    Fault(
        "check_sees_scales_of_the_next_step", "a step's weights are multiplied under the scales of the next one's",
        "sm100_gemm2_kernelILm2E", [Edit(MMA, NEXT_SCALES, 0)], CHECK100, False,
    ),
    Fault(
        "check_sees_half_of_scales", "A's scales of the second half are those of the first",
        "sm120_gemm2_kernelILm2E", [Edit(r"\+8256\]", "+8192]")], CHECK120, False,
    ),
    # ---- choices of a layer that the self-check must see
    Fault(
        "check_sees_bf16_rows", "rows are truncated to bf16",
        "sm100_gemm2_kernelILm2E", [Edit(r"cvt\.rn\.bf16", "cvt.rz.bf16")], CHECK100, False,
    ),
    Fault(
        "check_sees_biases", "up has the bias of the next channel", "sm100_gemm1_kernelILm2E",
        [Edit(r"(ld\.global\.nc\.f32 %f\d+), \[(%rd\d+)\];", r"\1, [\2+4];", slice(1, None, 2))], CHECK100, False,
    ),
    Fault(
        "check_sees_biases_of_down", "every second channel of down has no bias", "sm100_gemm2_kernelILm2E",
        [Edit(r"ld\.global\.nc\.f32 (%f\d+), \[%rd\d+\];", r"mov.f32 \1, 0f80000000;", slice(1, None, 2))],
        CHECK100, False,
    ),
    Fault(
        "check_sees_router_weights", "router weights before down are 1", "sm100_gemm1_kernelILm2E",
        [Edit(r"ld\.param\.u64 (%rd\d+), \[%rd\d+\+16\];", r"mov.b64 \1, 0;", -1)], CHECK100, False,
    ),
    Fault(
        "check_sees_dense_rows", "the last row of the shared expert is not computed", "sm100_gemm2_kernelILm",
        [Edit(r"(ld\.global\.cg\.s64 (%rd\d+), \[%rd\d+\];)", r"\1 sub.s64 \2, \2, 1;")], CHECK100, False,
    ),
]  # fmt: skip


def edited(fault, kernel, text):
    """Returns the module's text with the fault in that kernel, and whether there was anything to edit."""
    if not re.search(fault.kernels, kernel):
        return text, False
    begin = text.index(f".entry {kernel}(")
    end = text.find("\n.entry ", begin + 1)
    end = len(text) if end < 0 else end
    body, found = text[begin:end], 0
    for edit in fault.edits:
        matches = list(re.finditer(edit.pattern, body))
        if edit.which is not None:
            matches = matches[edit.which] if isinstance(edit.which, slice) else matches[edit.which :][:1]
        for match in reversed(matches):
            body = body[: match.start()] + match.expand(edit.by) + body[match.end() :]
        found += len(matches)
    return text[:begin] + body + text[end:], found > 0


def main():
    name, kernel, path = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
    fault = next(fault for fault in FAULTS if fault.name == name)
    text, done = edited(fault, kernel, path.read_text())
    if done:
        path.write_text(text)
        print(f"ptxemu: planted {name} in kernel {kernel}", file=sys.stderr)


if __name__ == "__main__":
    main()
