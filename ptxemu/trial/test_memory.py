"""Tests of memory: uninitialized, freed and out of bounds accesses, and unknown instructions."""

import ctypes

import numpy as np
import pytest

from trial.emulator import LaunchError, line_of, ptx

LOAD = "\n\tld.global.u32 %r1, [%rd_a];\n\tst.global.u32 [%rd_o], %r1;"


def report(emulator, text, arguments, **options):
    """Returns the emulator's report of a launch that must fail."""
    with pytest.raises(LaunchError) as raised:
        emulator.launch(emulator.kernel(text, "test"), arguments, **options)
    return str(raised.value)


def test_fresh_memory_is_poison(emulator):
    pointer = emulator.empty(64)
    assert (emulator.get(pointer, 64, np.uint8) == 0xCD).all()


@pytest.mark.parametrize(
    "offset, freed, parts",
    [
        (40, False,
         ("out of bounds: 4 bytes of global memory", "0 bytes after the end of device memory", "(40 bytes at")),
        (0, True, ("in freed device memory", "(40 bytes at")),
        (2, False, ("misaligned: 4 bytes",)),
    ],
)  # fmt: skip
def test_a_wrong_address_is_reported_with_its_allocation(emulator, offset, freed, parts):
    source, out, text = emulator.put(np.zeros(10, np.uint32)), emulator.empty(4), ptx(LOAD, "ao")
    if freed:
        emulator.free(source)
    said = report(emulator, text, [ctypes.c_void_p(source.value + offset), out])
    assert all(part in said for part in parts), said
    assert f"thread (0,0,0) of cta (0,0,0), PTX line {line_of(text, 'ld.global')}\n" in said


def test_shared_out_of_bounds(emulator):
    body = "\n\tmov.u32 %r1, block;\n\tst.shared.u32 [%r1+16], 1;"
    text = report(emulator, ptx(body, shared=".shared .align 16 .b8 block[16];"), [])
    assert "out of bounds: 4 bytes of shared memory at 0x410" in text and "the cta has 1040 bytes" in text


def test_copies_are_checked(emulator):
    pointer, data = emulator.empty(16), np.zeros(32, np.uint8)
    source = data.ctypes.data_as(ctypes.c_void_p)
    assert emulator.cuda.cudaMemcpy(pointer, source, ctypes.c_size_t(32), 1) == 1  # cudaErrorInvalidValue
    emulator.cuda.cudaGetLastError()


@pytest.mark.parametrize("instruction", ["frobnicate.b32 %r1, %r2;", "add.rn.sat.relu.f32 %f1, %f2, %f3;"])
def test_unknown_instructions_are_errors(emulator, capfd, instruction):
    text = ptx("\n\t" + instruction)
    report(emulator, text, [])
    said = capfd.readouterr().err
    assert f".ptx:{line_of(text, instruction)}: unknown" in said and instruction.rstrip(";") in said


@pytest.mark.parametrize(
    "load, expected",
    [
        ("ld.global.s8 %r1, [%rd_a];", 0xFFFFFF81),
        ("ld.global.u8 %r1, [%rd_a];", 0x81),
        ("ld.global.s16 %r1, [%rd_a];", 0xFFFF8281),
        # The address is among the destinations.
        ("mov.u64 %rd1, %rd_a; ld.global.v2.u64 {%rd1, %rd2}, [%rd1]; cvt.u32.u64 %r1, %rd2;", 0x8C8B8A89),
    ],
)
def test_loads(emulator, load, expected):
    data = np.arange(0x81, 0x91, dtype=np.uint8)
    assert emulator.run(f"\n\t{load} st.global.u32 [%rd_o], %r1;", [data], block=1)[0] == expected


def test_module_variables(emulator):
    variables = ".global .b8 odd[3] = {1, 2, 3};\n.global .align 4 .u32 table[4] = {5, 6, 7, 8};\n"
    body = """
	mov.u64 %rd1, table; ld.global.u32 %r1, [%rd1+8];
	mov.u64 %rd2, factor; ld.const.u32 %r2, [%rd2];
	mul.lo.s32 %r3, %r1, %r2; st.global.u32 [%rd_o], %r3;
"""
    assert emulator.run(body, shared=variables + ".const .align 4 .b32 factor = 3;")[0] == 21


def test_dynamic_shared_memory_lies_behind_the_static(emulator):
    body = """
	mov.u32 %r1, dynamic; mov.u32 %r2, static; st.shared.u32 [%r1+60], 7; st.shared.u32 [%r2+4], 5;
	ld.shared.u32 %r3, [%r1+60]; sub.u32 %r4, %r1, %r2; st.global.v2.u32 [%rd_o], {%r3, %r4};
"""
    shared = ".extern .shared .align 16 .b8 dynamic[];\n.shared .align 4 .b8 static[8];"
    assert emulator.run(body, shape=2, shared=shared, block=1, dynamic=64).tolist() == [7, 16]


def test_local_memory_and_calls(emulator):
    function = """
.func (.param .b32 result) twice(.param .b32 x)
{
	.reg .b32 %r<3>;
	ld.param.u32 %r1, [x]; add.u32 %r2, %r1, %r1; st.param.b32 [result], %r2; ret;
}
"""
    body = """
	.local .align 4 .b8 depot[16];
	mov.u64 %rd1, depot; cvta.local.u64 %rd2, %rd1;
	st.u32 [%rd2+4], 21; ld.local.u32 %r1, [%rd1+4];
	{
	.param .b32 argument; .param .b32 returned;
	st.param.b32 [argument], %r1;
	call.uni (returned), twice, (argument);
	ld.param.b32 %r2, [returned];
	}
	st.global.u32 [%rd_o], %r2;
"""
    assert emulator.run(body, shared=function)[0] == 42
