"""Matrices in registers: ldmatrix, stmatrix, mma.sync (dense and block-scaled), wgmma."""

from ..errors import TranslationError
from . import form


# ptxas takes the shape and the count in either order.
@form("ldmatrix", r"\.sync\.aligned\.x(?P<count>[124])\.m8n8(?P<trans>\.trans)?\.shared(::cta)?\.b16")
@form("ldmatrix", r"\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<trans>\.trans)?\.shared(::cta)?\.b16")
def ldmatrix(kernel, match, operands):
    names = kernel.vector(operands[0])
    trans = "true" if match["trans"] else "false"
    call = f"load_matrix(T,{match['count']},{trans},{kernel.address(operands[1])},loaded);"
    return f"uint32_t loaded[4]; {call} {kernel.put_all(names, 'loaded')}"


@form("stmatrix", r"\.sync\.aligned\.x(?P<count>[124])\.m8n8(?P<trans>\.trans)?\.shared(::cta)?\.b16")
@form("stmatrix", r"\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<trans>\.trans)?\.shared(::cta)?\.b16")
def stmatrix(kernel, match, operands):
    trans = "true" if match["trans"] else "false"
    array = kernel.array("stored", kernel.vector(operands[1]))
    return f"{array} store_matrix(T,{match['count']},{trans},{kernel.address(operands[0])},stored);"


def fragments(kernel, operands):
    """A, B and C as arrays, D declared; then the code that assigns D."""
    arrays = "".join(
        kernel.array(name, kernel.vector(operand)) for name, operand in zip("abc", operands[1:4], strict=True)
    )
    return arrays + "uint32_t d[4];", kernel.put_all(kernel.vector(operands[0]), "d")


@form("mma", r"\.sync\.aligned\.m16n8k(?P<k>8|16)\.row\.col\.f32\.(?P<type>f16|bf16)\.(?P<type2>f16|bf16)\.f32")
def mma(kernel, match, operands):
    if match["type"] != match["type2"]:
        raise TranslationError("A and B of different types")
    declared, assigned = fragments(kernel, operands)
    bf16 = "true" if match["type"] == "bf16" else "false"
    return f"{declared} multiply_halves(T,{match['k']},{bf16},d,a,b,c); {assigned}"


@form("mma", r"\.sync\.aligned\.m16n8k(?P<k>16|32)\.row\.col\.(?P<d>s32)\.(?P<a>[us]8)\.(?P<b>[us]8)\.s32")
def mma_integers(kernel, match, operands):
    declared, assigned = fragments(kernel, operands)
    signs = ",".join("true" if match[name][0] == "s" else "false" for name in "ab")
    return f"{declared} multiply_bytes(T,{match['k']},{signs},d,a,b,c); {assigned}"


@form("mma", r"\.sync\.aligned\.m16n8k32\.row\.col\.(kind::f8f6f4\.)?f32\.(?P<a>e4m3|e5m2)\.(?P<b>e4m3|e5m2)\.f32")
def mma_fp8(kernel, match, operands):
    declared, assigned = fragments(kernel, operands)
    kinds = ",".join(f"Small::k{match[name].upper()}" for name in "ab")
    return f"{declared} multiply_fp8(T,{kinds},d,a,b,c); {assigned}"


BLOCK_SCALED = (
    r"\.sync\.aligned(\.m16n8k64)(?P<late>\.row\.col)?\.kind::(?P<kind>mxf4nvf4|mxf4)\.block_scale"
    r"(\.scale_vec::(?P<vec>2X|4X))?(\.m16n8k64)?(\.row\.col)?\.f32\.e2m1\.e2m1\.f32\.(?P<scale>ue4m3|ue8m0)"
)


@form("mma", BLOCK_SCALED)
@form("mma", BLOCK_SCALED.replace(r"(\.m16n8k64)(?P<late>\.row\.col)?", "", 1))
def mma_block_scaled(kernel, match, operands):
    """Operands: d, a, b, c, scale-a, {byte-id, thread-id}, scale-b, {byte-id, thread-id}."""
    blocks = {"2X": 2, "4X": 4, None: 2}[match["vec"]]
    if (
        match["scale"] == "ue4m3"
        and blocks != 4
        or match["kind"] == "mxf4"
        and (blocks, match["scale"]) != (2, "ue8m0")
    ):
        raise TranslationError("this kind takes other scales")
    declared, assigned = fragments(kernel, operands)
    selectors = [kernel.vector(operands[i]) for i in (5, 7)]
    scales = ",".join(
        f"BlockScales{{{kernel.get(operands[4 + 2 * i], 32)},{kernel.get(selectors[i][0], 16)},{kernel.get(selectors[i][1], 16)}}}"
        for i in range(2)
    )
    ue8m0 = "true" if match["scale"] == "ue8m0" else "false"
    return f"{declared} multiply_block_scaled(T,{blocks},{ue8m0},{scales},d,a,b,c); {assigned}"


@form("wgmma", r"\.fence\.sync\.aligned")
def wgmma_fence(kernel, match, operands):
    return "wgmma_fence(T);"


@form("wgmma", r"\.commit_group\.sync\.aligned")
def wgmma_commit(kernel, match, operands):
    return "wgmma_commit(T);"


@form("wgmma", r"\.wait_group\.sync\.aligned")
def wgmma_wait(kernel, match, operands):
    return f"wgmma_wait(T,{kernel.get(operands[0], 32)});"


WGMMA_TYPES = {"f16": "kF16", "bf16": "kBf16", "e4m3": "kE4M3", "e5m2": "kE5M2"}


@form("wgmma", r"\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k(?P<k>16)\.f32\.(?P<type>f16|bf16)\.(?P<type2>f16|bf16)")
@form("wgmma", r"\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k(?P<k>32)\.f32\.(?P<type>e4m3|e5m2)\.(?P<type2>e4m3|e5m2)")
def wgmma(kernel, match, operands):
    """Operands: d, a (registers or a descriptor), b, scale-d, imm-scale-a, imm-scale-b, [trans-a,] trans-b."""
    n, d = int(match["n"]), kernel.vector(operands[0])
    from_registers = operands[1].startswith("{")
    transposes = operands[6:]
    halves = match["k"] == "16"
    if (halves and match["type"] != match["type2"]) or len(d) != n // 2 or n % 8 or not 8 <= n <= 256:
        raise TranslationError("unexpected types or sizes of wgmma")
    if operands[4:6] != ["1", "1"] or any(value != "0" for value in transposes):
        raise TranslationError("wgmma with negated or transposed operands is not supported")
    if from_registers:
        a = kernel.array("a", kernel.vector(operands[1])) + "uint64_t a_descriptor=0;"
    else:
        a = f"uint32_t* a=nullptr; uint64_t a_descriptor={kernel.get(operands[1], 64)};"
    registers = ",".join(f"&{kernel.register(name)[1]}" for name in d)
    types = ",".join(f"WgmmaType::{WGMMA_TYPES[match[name]]}" for name in ("type", "type2"))
    used = d + (kernel.vector(operands[1]) if from_registers else [])
    lines = [kernel.unfenced[name] for name in used if name in kernel.unfenced]
    unfenced = f"on_unfenced(T,{max(lines)}); " if lines else ""
    values = f"{n},{types},a,a_descriptor,{kernel.get(operands[2], 64)},{kernel.predicate(operands[3])},d"
    return f"{unfenced}uint32_t* const d[{len(d)}]={{{registers}}}; {a} wgmma_issue(T,{values});"
