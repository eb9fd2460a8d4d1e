"""Matrices in registers: ldmatrix, stmatrix, mma.sync (dense and block-scaled), wgmma."""

from ..errors import TranslationError
from ..types import UNSIGNED
from . import Group, effects, form, values

# ptxas takes the shape, the count and .trans in other orders too.
TRANS = r"(?P<trans>\.trans)?"
COUNT, SHAPE = r"\.x(?P<count>[124])", r"\.m8n8"
MATRICES = [
    rf"\.sync\.aligned{form}\.shared(::cta)?\.b16"
    for form in (COUNT + SHAPE + TRANS, SHAPE + COUNT + TRANS, COUNT + TRANS.rstrip("?") + SHAPE)
]


@form("ldmatrix", MATRICES[0])
@form("ldmatrix", MATRICES[1])
@form("ldmatrix", MATRICES[2])
def ldmatrix(kernel, match, operands):
    names = kernel.vector(operands[0])
    call = f"load_matrix(T,{match['count']},{Group(match['trans']):flag},{kernel.address(operands[1])},loaded);"
    return f"uint32_t loaded[4]; {call} {kernel.put_all(names, 'loaded')}"


@form("stmatrix", MATRICES[0])
@form("stmatrix", MATRICES[1])
@form("stmatrix", MATRICES[2])
@form("stmatrix", r"\.sync\.aligned" + COUNT + SHAPE + r"\.shared(::cta)?\.b16(?P<trans>\.trans)")  # ptxas takes it
def stmatrix(kernel, match, operands):
    array = kernel.array("stored", kernel.vector(operands[1]))
    place = f"{match['count']},{Group(match['trans']):flag},{kernel.address(operands[0])}"
    return f"{array} store_matrix(T,{place},stored);"


BYTES = r"\.shared(::cta)?\.b8(x16\.(?P<source>b6x16_p32|b4x16_p64))?"
SOURCE_BITS = {None: 8, "b6x16_p32": 6, "b4x16_p64": 4}


def byte_matrices(kernel, match, operands, name, registers):
    names = kernel.vector(operands[0])
    if len(names) != registers:
        raise TranslationError("this shape has another number of registers")
    values = f"{match['count']},{SOURCE_BITS[match['source']]},{kernel.address(operands[1])}"
    return f"uint32_t loaded[4]; {name}(T,{values},loaded); {kernel.put_all(names, 'loaded')}"


@form("ldmatrix", r"\.sync\.aligned\.m8n16" + COUNT + BYTES)
def ldmatrix_bytes(kernel, match, operands):
    if not match["source"]:
        raise TranslationError("m8n16 has elements of four or six bits")
    return byte_matrices(kernel, match, operands, "load_byte_matrix", int(match["count"]))


@form("ldmatrix", r"\.sync\.aligned\.m16n16\.x(?P<count>[12])\.trans" + BYTES)
def ldmatrix_bytes_transposed(kernel, match, operands):
    return byte_matrices(kernel, match, operands, "load_byte_matrix_transposed", 2 * int(match["count"]))


@form("stmatrix", r"\.sync\.aligned\.m16n8" + COUNT + r"\.trans\.shared(::cta)?\.b8")
def stmatrix_bytes(kernel, match, operands):
    array = kernel.array("stored", kernel.vector(operands[1]))
    return f"{array} store_byte_matrix(T,{match['count']},{kernel.address(operands[0])},stored);"


values(("movmatrix", r"\.sync\.aligned\.m8n8\.trans\.b16", "transpose_matrix(T,{1:32})"))


def product(kernel, operands, call, counts=(4, 4, 2, 4), bits=32):
    """Arrays of A, B and C, a call with these and d, and the code that assigns D. counts: registers of d, a, b, c."""
    vectors = [kernel.vector(operand) for operand in operands[:4]]
    if tuple(map(len, vectors)) != tuple(counts):
        raise TranslationError("this shape has another number of registers")
    arrays = "".join(kernel.array(part, names, bits) for part, names in zip("abc", vectors[1:], strict=True))
    return f"{arrays}{UNSIGNED[bits]} d[{counts[0]}]; {call},d,a,b,c); {kernel.put_all(vectors[0], 'd')}"


MMA_TYPES = {
    **{name: f"k{name.capitalize()}" for name in ("f16", "bf16", "tf32", "f32", "f64", "s8", "u8", "s4", "u4", "s32")},
    **{name: f"k{name.upper()}" for name in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")},
    "b1and": "kB1And",
    "b1xor": "kB1Xor",
}
ELEMENT_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "s4": 4, "u4": 4, "b1": 1}  # 8 for all others
# The shapes (m, k) of each type; n is 8.
SHAPES = {
    "f16": {(16, 8), (16, 16)},
    "bf16": {(16, 8), (16, 16)},
    "tf32": {(16, 4), (16, 8)},
    "f64": {(8, 4), (16, 4), (16, 8), (16, 16)},
    **dict.fromkeys(("s8", "u8"), {(8, 16), (16, 16), (16, 32)}),
    **dict.fromkeys(("s4", "u4"), {(8, 32), (16, 32), (16, 64)}),
    **dict.fromkeys(("e4m3", "e5m2"), {(16, 16), (16, 32)}),
    **dict.fromkeys(("e2m3", "e3m2", "e2m1"), {(16, 32)}),
    "b1": {(8, 128), (16, 128), (16, 256)},
}


def mma_form(match, d):
    types = [match["a"] + (match.get("op") or ""), match["b"] + (match.get("op") or ""), d]
    names = ",".join(f"MmaType::{MMA_TYPES[name]}" for name in types)
    saturates = "true" if match.get("sat") or match.get("late") else "false"
    return f"MmaForm{{{match['m']},{match['k']},{names},{saturates}}}"


SYNC, SIZE = r"\.sync\.aligned", r"\.m(?P<m>8|16)n8k(?P<k>\d+)\.row\.col"
SMALL = "(e4m3|e5m2|e2m3|e3m2|e2m1)"
SIZE_AND_KIND = SIZE + r"(?P<kind>\.kind::f8f6f4)?", r"(?P<kind>\.kind::f8f6f4)" + SIZE
SAT = r"(?P<{}>\.satfinite)?"


@form("mma", SYNC + SIZE + r"\.(?P<d>f32|f16)\.(?P<a>f16)\.(?P<b>f16)\.(?P=d)")
@form("mma", SYNC + SIZE + r"\.(?P<d>f32)\.(?P<a>bf16|tf32)\.(?P<b>(?P=a))\.f32")
@form("mma", SYNC + SIZE_AND_KIND[0] + rf"\.(?P<d>f32|f16)\.(?P<a>{SMALL})\.(?P<b>{SMALL})\.(?P=d)")
@form("mma", SYNC + SIZE_AND_KIND[1] + rf"\.(?P<d>f32|f16)\.(?P<a>{SMALL})\.(?P<b>{SMALL})\.(?P=d)")
@form("mma", SYNC + SIZE + SAT.format("sat") + r"\.s32\.(?P<a>[us]8)\.(?P<b>[us]8)\.s32" + SAT.format("late"))
@form("mma", SYNC + SIZE + SAT.format("sat") + r"\.s32\.(?P<a>[us]4)\.(?P<b>[us]4)\.s32" + SAT.format("late"))
@form("mma", SYNC + SIZE + r"\.s32\.(?P<a>b1)\.(?P<b>b1)\.s32\.(?P<op>and|xor)\.popc")
@form("mma", SYNC + SIZE + r"\.(?P<d>f64)\.(?P<a>f64)\.(?P<b>f64)\.f64(\.rn)?")
def mma(kernel, match, operands):
    m, k, a, b = int(match["m"]), int(match["k"]), match["a"], match["b"]
    if (m, k) not in SHAPES[a] & SHAPES[b]:
        raise TranslationError("these types have no such shape")
    if a[0] == "e" and not match["kind"] and not {a, b} <= {"e4m3", "e5m2"}:
        raise TranslationError("these types require .kind::f8f6f4")
    d, bits = match.get("d") or "s32", ELEMENT_BITS.get(a, 8)
    words = m * k * bits // (64 if a == "f64" else 32) // 32
    results = m // (8 if d == "f16" else 4)
    call = f"multiply_matrices(T,{mma_form(match, d)}"
    return product(kernel, operands, call, (results, words, words // (m // 8), results), 64 if a == "f64" else 32)


SCALE_VECTOR = r"(\.scale_vec::(?P<vec>1X|2X|4X))?"
BLOCK_SCALED = (
    r"\.kind::(?P<kind>mxf4nvf4|mxf4)\.block_scale" + SCALE_VECTOR + r"(\.m16n8k64)?(\.row\.col)?"
    r"\.f32\.e2m1\.e2m1\.f32\.(?P<scale>ue4m3|ue8m0)"
)


def scales_of(kernel, operands):
    """Operands: scale-a, {byte-id, thread-id}, scale-b, {byte-id, thread-id}."""
    for scale, selector in (operands[:2], operands[2:4]):
        byte, thread = kernel.vector(selector)
        yield f"BlockScales{{{kernel.get(scale, 32)},{kernel.get(byte, 16)},{kernel.get(thread, 16)}}}"


@form("mma", SYNC + r"\.m16n8k64(\.row\.col)?" + BLOCK_SCALED)
@form("mma", SYNC + BLOCK_SCALED)
def mma_block_scaled(kernel, match, operands):
    blocks = 4 if match["vec"] == "4X" else 2
    # UE4M3 has only blocks of 16, and mxf4 only blocks of 32 with UE8M0.
    if (match["scale"] == "ue4m3" or match["kind"] == "mxf4") and (match["kind"], blocks, match["scale"]) not in (
        ("mxf4nvf4", 4, "ue4m3"),
        ("mxf4", 2, "ue8m0"),
    ):
        raise TranslationError("this kind takes other scales")
    ue8m0 = "true" if match["scale"] == "ue8m0" else "false"
    return product(
        kernel, operands, f"multiply_block_scaled(T,{blocks},{ue8m0},{','.join(scales_of(kernel, operands[4:]))}"
    )


MX = r"(?P<kind>\.kind::mxf8f6f4)\.block_scale(\.scale_vec::1X)?"
MX_TYPES = rf"\.f32\.(?P<a>{SMALL})\.(?P<b>{SMALL})\.f32\.ue8m0"


@form("mma", SYNC + r"\.m(?P<m>16)n8k(?P<k>32)\.row\.col" + MX + MX_TYPES)
@form("mma", SYNC + MX + r"\.m(?P<m>16)n8k(?P<k>32)\.row\.col" + MX_TYPES)
def mma_scaled_rows(kernel, match, operands):
    form, scales = mma_form(match, "f32"), ",".join(scales_of(kernel, operands[4:]))
    return product(kernel, operands, f"multiply_scaled_rows(T,{form},{scales}")


effects(
    ("wgmma", r"\.fence\.sync\.aligned", "wgmma_fence(T);"),
    ("wgmma", r"\.commit_group\.sync\.aligned", "wgmma_commit(T);"),
    ("wgmma", r"\.wait_group\.sync\.aligned", "wgmma_wait(T,{0:32});"),
)
WGMMA_TYPES = {"f16": "kF16", "bf16": "kBf16", "e4m3": "kE4M3", "e5m2": "kE5M2"}


@form("wgmma", r"\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k16\.f32\.(?P<a>b?f16)\.(?P<b>(?P=a))")
@form("wgmma", r"\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k32\.f32\.(?P<a>e4m3|e5m2)\.(?P<b>e4m3|e5m2)")
def wgmma(kernel, match, operands):
    """Operands: d, a (registers or a descriptor), b, scale-d, imm-scale-a, imm-scale-b, [trans-a,] trans-b."""
    n, d = int(match["n"]), kernel.vector(operands[0])
    from_registers = operands[1].startswith("{")
    if len(d) != n // 2 or n % 8 or not 8 <= n <= 256:
        raise TranslationError("unexpected sizes of wgmma")
    if operands[4:6] != ["1", "1"] or any(value != "0" for value in operands[6:]):
        raise TranslationError("wgmma with negated or transposed operands is not supported")
    if from_registers:
        a = kernel.array("a", kernel.vector(operands[1])) + "uint64_t a_descriptor=0;"
    else:
        a = f"uint32_t* a=nullptr; uint64_t a_descriptor={kernel.get(operands[1], 64)};"
    registers = ",".join(f"&{kernel.register(name)[1]}" for name in d)
    types = ",".join(f"WgmmaType::{WGMMA_TYPES[match[name]]}" for name in "ab")
    used = d + (kernel.vector(operands[1]) if from_registers else [])
    lines = [kernel.unfenced[name] for name in used if name in kernel.unfenced]
    unfenced = f"on_unfenced(T,{max(lines)}); " if lines else ""
    values = f"{n},{types},a,a_descriptor,{kernel.get(operands[2], 64)},{kernel.predicate(operands[3])},d"
    return f"{unfenced}uint32_t* const d[{len(d)}]={{{registers}}}; {a} wgmma_issue(T,{values});"
