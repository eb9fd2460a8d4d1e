"""Memory: what is fresh, freed or out of bounds, and what an unknown instruction is."""

import ctypes

import numpy as np
import pytest

from trial.emulator import LaunchError, line_of, ptx

LOAD = "\n\tld.global.u32 %r1, [%rd_a];\n\tst.global.u32 [%rd_o], %r1;"


def report(emulator, text, arguments, **options):
    """What the emulator says of a launch that must fail."""
    with pytest.raises(LaunchError) as raised:
        emulator.launch(emulator.kernel(text, "test"), arguments, **options)
    return str(raised.value)


def test_fresh_memory_is_poison(emulator):
    pointer = emulator.empty(64)
    assert (emulator.get(pointer, 64, np.uint8) == 0xCD).all()


def test_out_of_bounds_names_the_allocation(emulator):
    source, out = emulator.put(np.zeros(10, np.uint32)), emulator.empty(4)
    beyond = ctypes.c_void_p(source.value + 40)
    source_text = ptx(LOAD, "ao")
    text = report(emulator, source_text, [beyond, out])
    line = line_of(source_text, "ld.global")
    assert "out of bounds: 4 bytes of global memory" in text and "0 bytes after the end of device memory" in text
    assert "(40 bytes at" in text and f"PTX line {line}\n" in text and "thread (0,0,0) of cta (0,0,0)" in text


def test_use_after_free_names_the_allocation(emulator):
    source, out = emulator.put(np.zeros(10, np.uint32)), emulator.empty(4)
    emulator.free(source)
    assert "in freed device memory" in report(emulator, ptx(LOAD, "ao"), [source, out])


def test_misaligned(emulator):
    source, out = emulator.put(np.zeros(10, np.uint32)), emulator.empty(4)
    assert "misaligned: 4 bytes" in report(emulator, ptx(LOAD, "ao"), [ctypes.c_void_p(source.value + 2), out])


def test_shared_out_of_bounds(emulator):
    body = "\n\tmov.u32 %r1, block;\n\tst.shared.u32 [%r1+16], 1;"
    text = report(emulator, ptx(body, shared=".shared .align 16 .b8 block[16];"), [])
    assert "out of bounds: 4 bytes of shared memory at 0x410" in text and "the cta has 1040 bytes" in text


def test_copies_are_checked(emulator):
    pointer = emulator.empty(16)
    data = np.zeros(32, np.uint8)
    source = data.ctypes.data_as(ctypes.c_void_p)
    assert emulator.cuda.cudaMemcpy(pointer, source, ctypes.c_size_t(32), 1) == 1  # cudaErrorInvalidValue
    emulator.cuda.cudaGetLastError()


@pytest.mark.parametrize(
    "instruction", ["frobnicate.b32 %r1, %r2;", "bfind.shiftmount.u32 %r1, %r2;", "add.rn.sat.relu.f32 %f1, %f2, %f3;"]
)
def test_unknown_instructions_are_errors(emulator, capfd, instruction):
    text = ptx("\n\t" + instruction)
    with pytest.raises(LaunchError):
        emulator.launch(emulator.kernel(text, "test"), [])
    said = capfd.readouterr().err
    assert f".ptx:{line_of(text, instruction)}: unknown" in said and instruction.rstrip(";") in said


def test_module_variables(emulator):
    variables = ".global .align 4 .u32 table[4] = {5, 6, 7, 8};\n.const .align 4 .b32 factor = 3;"
    body = """
	mov.u64 %rd1, table; ld.global.u32 %r1, [%rd1+8];
	mov.u64 %rd2, factor; ld.const.u32 %r2, [%rd2];
	mul.lo.s32 %r3, %r1, %r2; st.global.u32 [%rd_o], %r3;
"""
    out = emulator.empty(4)
    emulator.launch(emulator.kernel(ptx(body, "o", shared=variables), "test"), [out])
    assert emulator.get(out, 1, np.uint32)[0] == 21


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
    out = emulator.empty(4)
    emulator.launch(emulator.kernel(ptx(body, "o", shared=function), "test"), [out])
    assert emulator.get(out, 1, np.uint32)[0] == 42
