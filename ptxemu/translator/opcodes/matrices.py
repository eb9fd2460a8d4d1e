"""Matrices in registers: ldmatrix, stmatrix, mma.sync (dense and block-scaled), wgmma."""

from ..errors import TranslationError
from . import Group, effects, form

# ptxas takes the shape and the count in either order.
COUNT, SHAPE = r"\.x(?P<count>[124])", r"\.m8n8"
MATRICES = [
    r"\.sync\.aligned" + both + r"(?P<trans>\.trans)?\.shared(::cta)?\.b16" for both in (COUNT + SHAPE, SHAPE + COUNT)
]


@form("ldmatrix", MATRICES[0])
@form("ldmatrix", MATRICES[1])
def ldmatrix(kernel, match, operands):
    names = kernel.vector(operands[0])
    call = f"load_matrix(T,{match['count']},{Group(match['trans']):flag},{kernel.address(operands[1])},loaded);"
    return f"uint32_t loaded[4]; {call} {kernel.put_all(names, 'loaded')}"


@form("stmatrix", MATRICES[0])
@form("stmatrix", MATRICES[1])
def stmatrix(kernel, match, operands):
    array = kernel.array("stored", kernel.vector(operands[1]))
    place = f"{match['count']},{Group(match['trans']):flag},{kernel.address(operands[0])}"
    return f"{array} store_matrix(T,{place},stored);"


def product(kernel, operands, name, *values):
    """A, B and C as arrays, the call, and the code that assigns D."""
    parts = zip("abc", operands[1:4], strict=True)
    arrays = "".join(kernel.array(part, kernel.vector(operand)) for part, operand in parts)
    call = f"{name}(T,{','.join(map(str, values))},d,a,b,c);"
    return f"{arrays}uint32_t d[4]; {call} {kernel.put_all(kernel.vector(operands[0]), 'd')}"


@form("mma", r"\.sync\.aligned\.m16n8k(?P<k>8|16)\.row\.col\.f32\.(?P<type>b?f16)\.(?P=type)\.f32")
def mma(kernel, match, operands):
    bf16 = "true" if match["type"] == "bf16" else "false"
    return product(kernel, operands, "multiply_halves", match["k"], bf16)


@form("mma", r"\.sync\.aligned\.m16n8k(?P<k>16|32)\.row\.col\.s32\.(?P<a>[us]8)\.(?P<b>[us]8)\.s32")
def mma_integers(kernel, match, operands):
    signs = (f"{Group(match[name]):is_signed}" for name in "ab")
    return product(kernel, operands, "multiply_bytes", match["k"], *signs)


@form("mma", r"\.sync\.aligned\.m16n8k32\.row\.col\.(kind::f8f6f4\.)?f32\.(?P<a>e4m3|e5m2)\.(?P<b>e4m3|e5m2)\.f32")
def mma_fp8(kernel, match, operands):
    return product(kernel, operands, "multiply_fp8", *(f"Small::k{match[name].upper()}" for name in "ab"))


BLOCK_SCALED = (
    r"\.kind::(?P<kind>mxf4nvf4|mxf4)\.block_scale"
    r"(\.scale_vec::(?P<vec>2X|4X))?(\.m16n8k64)?(\.row\.col)?\.f32\.e2m1\.e2m1\.f32\.(?P<scale>ue4m3|ue8m0)"
)


@form("mma", r"\.sync\.aligned\.m16n8k64(\.row\.col)?" + BLOCK_SCALED)
@form("mma", r"\.sync\.aligned" + BLOCK_SCALED)
def mma_block_scaled(kernel, match, operands):
    """Operands: d, a, b, c, scale-a, {byte-id, thread-id}, scale-b, {byte-id, thread-id}."""
    blocks = 4 if match["vec"] == "4X" else 2
    # UE4M3 has only blocks of 16, and mxf4 only blocks of 32 with UE8M0.
    if (match["scale"] == "ue4m3" or match["kind"] == "mxf4") and (match["kind"], blocks, match["scale"]) not in (
        ("mxf4nvf4", 4, "ue4m3"),
        ("mxf4", 2, "ue8m0"),
    ):
        raise TranslationError("this kind takes other scales")
    scales = []
    for scale, selector in (operands[4:6], operands[6:8]):
        byte, thread = kernel.vector(selector)
        scales.append(f"BlockScales{{{kernel.get(scale, 32)},{kernel.get(byte, 16)},{kernel.get(thread, 16)}}}")
    ue8m0 = "true" if match["scale"] == "ue8m0" else "false"
    return product(kernel, operands, "multiply_block_scaled", blocks, ue8m0, *scales)


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
