"""mma.sync of every dense type and shape, and the forms of ldmatrix, stmatrix and movmatrix of bytes and less.

A kernel has all instructions of a family. They read the same words of each lane; the values are computed here from the
places that the PTX manual gives (9.7.14.5).
"""

import ml_dtypes
import numpy as np
import pytest

from trial.emulator import LaunchError

GENERATOR = np.random.default_rng(19)
LANES = np.arange(32)
G, Q = LANES // 4, LANES % 4

SMALL = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "s4": 4, "u4": 4, "b1": 1}


def split(words, bits):
    """(32, n) words of 32 bits as elements of `bits` bits, the first lowest."""
    if bits >= 32:
        return words if bits == 32 else words.view(np.uint64)
    ones = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").reshape(32, -1, bits)
    return (ones.astype(np.uint32) << np.arange(bits, dtype=np.uint32)).sum(-1).astype(np.uint32)


def values(kind, elements):
    """The numbers of elements of a type, exact in double or int64."""
    if kind in SMALL:
        codes = elements.astype(np.uint8)
        if kind == "e2m1":
            codes = codes >> 2 & 15  # the middle of the byte
        elif kind in ("e2m3", "e3m2"):
            codes &= 63
        return codes.view(SMALL[kind]).astype(np.float64)
    if kind in ("f16", "bf16"):
        dtype = np.float16 if kind == "f16" else ml_dtypes.bfloat16
        return elements.astype(np.uint16).view(dtype).astype(np.float64)
    if kind == "tf32":
        return (elements & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if kind == "f64":
        return elements.view(np.float64)
    signed = elements.astype(np.int64)
    width = BITS.get(kind, 8)
    return np.where(signed >> (width - 1), signed - (1 << width), signed) if kind[0] == "s" else signed


def matrices(words_a, words_b, m, k, a, b):
    """A (m, k) and B (k, 8): element i of a lane is in register i // e of e elements each."""
    bits = BITS.get(a, 8)
    e, halves = max(32 // bits, 1), m // 8
    left, right = np.zeros((m, k)), np.zeros((k, 8))
    if a[0] in "sub" and a != "bf16":
        left, right = left.astype(np.int64), right.astype(np.int64)
    of_a, of_b = values(a, split(words_a, bits)), values(b, split(words_b, bits))
    for i in range(m * k // 32):
        register = i // e
        left[G + 8 * (register % halves), register // halves * 4 * e + Q * e + i % e] = of_a[:, i]
    for i in range(k * 8 // 32):
        right[i // e * 4 * e + Q * e + i % e, G] = of_b[:, i]
    return left, right


def places(m):
    """The rows and columns of a lane's elements of C and D."""
    i = np.arange(m // 4)
    return G[:, None] + i // 2 * 8, 2 * Q[:, None] + i % 2


def family(emulator, names, words_a, words_b, words_c, extra="", inputs=()):
    """Runs mma instructions one after the other: name, registers of d, a, b, c. Returns (instruction, 32, 8) words."""
    lines = ["mov.u32 %r1, %tid.x; .reg .b32 a<16>, b<16>, c<16>, d<16>; .reg .b64 ga, gb, gc, gd;"]
    for letter, pointer, words in (("a", "%rd_a", words_a), ("b", "%rd_b", words_b), ("c", "%rd_c", words_c)):
        count = words.shape[1]
        lines.append(f"mul.wide.u32 g{letter}, %r1, {4 * count}; add.s64 g{letter}, g{letter}, {pointer};")
        lines += [f"ld.global.u32 {letter}{i}, [g{letter}+{4 * i}];" for i in range(count)]
    lines.append(f"mul.wide.u32 gd, %r1, 32; add.s64 gd, gd, %rd_o; {extra}")
    for at, (name, counts) in enumerate(names):
        vectors = ["{" + ",".join(f"{x}{i}" for i in range(n)) + "}" for x, n in zip("dabc", counts, strict=True)]
        lines += [f"mov.u32 d{i}, 0;" for i in range(8)]
        lines.append(name.replace("OPERANDS", ",".join(vectors)))
        lines += [f"st.global.u32 [gd+{1024 * at + 4 * i}], d{i};" for i in range(8)]
    shape = (len(names), 32, 8)
    return emulator.run("\n".join(lines), [words_a, words_b, words_c, *inputs], shape, target="sm_120a")


def counts(m, k, a, d):
    """How many registers of 32 bits d, a, b and c have."""
    words = m * k * BITS.get(a, 8) // 1024
    results = m // 4 * (2 if d == "f64" else 1) // (2 if d == "f16" else 1)
    return results, words, words * 8 // m, results


def bytes_of_every_type(shape):
    """Bytes that are no NaN in any type of float, and whose sums double holds."""
    exponents = GENERATOR.integers(8, 23, shape)
    return (GENERATOR.integers(0, 2, shape) << 7 | exponents << 2 | GENERATOR.integers(0, 4, shape)).astype(np.uint8)


def small_words(n):
    return bytes_of_every_type((32, 4 * n)).view(np.uint32)


def halves(shape, scale=1.0):
    return (GENERATOR.integers(-2048, 2048, shape) * scale).astype(np.float16)


def check_floats(got, left, right, m, d, words_c):
    """D is A B + C, rounded once to f32 or f16."""
    rows, columns = places(m)
    c = words_c.view(np.float32) if d == "f32" else np.ascontiguousarray(words_c).view(np.float16)
    want = (left @ right)[rows, columns] + c[:, : m // 4].astype(np.float64)
    with np.errstate(over="ignore"):
        want = want.astype(np.float32 if d == "f32" else np.float16)
    words = want.shape[1] * want.dtype.itemsize // 4
    assert (np.ascontiguousarray(got[:, :words]).view(want.dtype) == want).all()


@pytest.mark.parametrize("d", ["f32", "f16"])
def test_products_of_f8f6f4(emulator, d):
    """All pairs of types. E2M1 is in the middle four bits of a byte, six bits are in its lower ones."""
    pairs = [(a, b) for a in SMALL for b in SMALL]
    forms = [(f"mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.{d}.{a}.{b}.{d}", a, b, 32) for a, b in pairs]
    forms += [(f"mma.sync.aligned.m16n8k{k}.row.col.{d}.e4m3.e5m2.{d}", "e4m3", "e5m2", k) for k in (16, 32)]
    words = small_words(4), small_words(2), halves((32, 8), 2.0**-3).view(np.uint32)
    if d == "f32":
        words = *words[:2], halves((32, 4)).astype(np.float32).view(np.uint32)
    names = [(f"{name} OPERANDS;", counts(16, k, a, d)) for name, a, _, k in forms]
    got = family(emulator, names, *words)
    for result, (_, a, b, k) in zip(got, forms, strict=True):
        n = counts(16, k, a, d)
        left, right = matrices(words[0][:, : n[1]].copy(), words[1][:, : n[2]].copy(), 16, k, a, b)
        check_floats(result, left, right, 16, d, words[2])


def test_products_of_mxf8f6f4(emulator):
    """One UE8M0 scale a row, from the byte and the lane of the quad that the selectors name."""
    pairs = [(a, b) for a in SMALL for b in SMALL]
    words = small_words(4), small_words(2), halves((32, 4)).astype(np.float32).view(np.uint32)
    name = "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.{}.{}.f32.ue8m0 OPERANDS, "
    name += "%r40, {{%h1, %h2}}, %r41, {{%h3, %h4}};"
    names = [(name.format(a, b), counts(16, 32, a, "f32")) for a, b in pairs]
    extra = "mul.wide.u32 %rd9, %r1, 8; add.s64 %rd9, %rd9, %rd_d; ld.global.v2.u32 {%r40, %r41}, [%rd9];"
    extra += "".join(f"cvt.u16.u32 %h{i + 1}, %r_{letter};" for i, letter in enumerate("efgh"))
    for byte_a, thread_a, byte_b, thread_b in ((0, 0, 0, 0), (1, 1, 3, 2), (3, 0, 2, 3)):
        scales = GENERATOR.integers(120, 135, (32, 8)).astype(np.uint8)
        scales[2 * thread_a, byte_a] = 255  # NaN, of row 0
        got = family(emulator, names, *words, extra, [scales.view(np.uint32), byte_a, thread_a, byte_b, thread_b])
        of_a = np.empty(16)
        row = LANES // 4 + 8 * (LANES % 2)
        chosen = Q // 2 == thread_a
        of_a[row[chosen]] = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(int) - 127))[chosen, byte_a]
        of_b = np.ldexp(1.0, scales[Q == thread_b, 4 + byte_b].astype(int) - 127)
        for result, (a, b) in zip(got, pairs, strict=True):
            left, right = matrices(words[0], words[1], 16, 32, a, b)
            rows, columns = places(16)
            scaled = (left @ right) * of_a[:, None] * of_b[None]
            want = (scaled[rows, columns] + words[2].view(np.float32)).astype(np.float32)
            result = result[:, :4].copy().view(np.float32)
            assert ((result == want) | (np.isnan(result) & np.isnan(want))).all() and np.isnan(want).any()


def test_byte_ids_of_one_scale_a_row(emulator):
    name = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e4m3.e4m3.f32.ue8m0 OPERANDS, "
    name += "%r40, {%h1, %h2}, %r40, {%h2, %h2};"
    for byte, thread, said in ((4, 0, "no such byte-id"), (0, 2, "no such thread-id")):
        extra = f"mov.u32 %r40, 0; mov.u16 %h1, {byte}; mov.u16 %h2, {thread};"
        with pytest.raises(LaunchError, match=said):
            zeros = [np.zeros((32, n), np.uint32) for n in (4, 2, 4)]
            family(emulator, [(name, counts(16, 32, "e4m3", "f32"))], *zeros, extra)


def test_products_of_halves_and_tf32(emulator):
    """f16 with sums of f16, bf16 of k 8, and tf32, whose upper 19 bits count."""
    forms = [(f"m16n8k{k}.row.col.f16.f16.f16.f16", "f16", "f16", k) for k in (8, 16)]
    forms += [(f"m16n8k{k}.row.col.f32.f16.f16.f32", "f16", "f32", k) for k in (8, 16)]
    forms += [("m16n8k8.row.col.f32.bf16.bf16.f32", "bf16", "f32", 8)]
    forms += [(f"m16n8k{k}.row.col.f32.tf32.tf32.f32", "tf32", "f32", k) for k in (4, 8)]
    words = [halves((32, 2 * n), 2.0**-5).view(np.uint32) for n in (4, 2, 4)]
    words[1] |= np.uint32(0x00010001)
    names = [(f"mma.sync.aligned.{name} OPERANDS;", counts(16, k, a, d)) for name, a, d, k in forms]
    c = {"f16": words[2], "f32": words[2] & np.uint32(0x43FFFFFF)}
    for d in c:
        chosen = [i for i, form in enumerate(forms) if form[2] == d]
        # Exponents of words as f32, tf32 and bf16 are near 1.
        a, b = (words[0], words[1]) if d == "f16" else (near_one(words[0]), near_one(words[1]))
        got = family(emulator, [names[i] for i in chosen], a, b, c[d])
        for result, i in zip(got, chosen, strict=True):
            _, kind, _, k = forms[i]
            n = counts(16, k, kind, d)
            left, right = matrices(a[:, : n[1]].copy(), b[:, : n[2]].copy(), 16, k, kind, kind)
            check_floats(result, left, right, 16, d, c[d])


def near_one(words):
    """Both halves with exponents near that of 1, as bf16 and f32."""
    return words & np.uint32(0x80FF807F) | np.uint32(0x3F003F00)


@pytest.mark.parametrize("width", [8, 4])
def test_products_of_integers(emulator, width):
    """s32 sums wrap, or with .satfinite saturate."""
    shapes = ((8, 16), (16, 16), (16, 32)) if width == 8 else ((8, 32), (16, 32), (16, 64))
    forms = [
        (m, k, f"{a}{width}", f"{b}{width}", sat) for m, k in shapes for a in "us" for b in "us" for sat in (0, 1, 2)
    ]
    words = [GENERATOR.integers(0, 2**32, (32, n), dtype=np.uint32) for n in (4, 2)]
    words.append(GENERATOR.choice(np.array([2**31 - 1, 2**31, 0, 77, 2**31 - 300], np.uint32), (32, 4)))
    names = []
    for m, k, a, b, sat in forms:
        early, late = ("", ".satfinite", "")[sat], ("", "", ".satfinite")[sat]
        name = f"mma.sync.aligned.m{m}n8k{k}.row.col{early}.s32.{a}.{b}.s32{late} OPERANDS;"
        names.append((name, counts(m, k, a, "s32")))
    got = family(emulator, names, *words).view(np.int32)
    for result, (m, k, a, b, sat) in zip(got, forms, strict=True):
        n = counts(m, k, a, "s32")
        left, right = matrices(words[0][:, : n[1]].copy(), words[1][:, : n[2]].copy(), m, k, a, b)
        rows, columns = places(m)
        want = (left @ right)[rows, columns] + words[2].view(np.int32)[:, : m // 4]
        want = np.clip(want, -(2**31), 2**31 - 1) if sat else want.astype(np.int32)
        assert (result[:, : m // 4] == want).all(), (m, k, a, b, sat)


def test_products_of_bits_and_doubles(emulator):
    """b1 with and, xor; f64 with numbers whose sums are exact."""
    forms = [(m, k, op) for m, k in ((8, 128), (16, 128), (16, 256)) for op in ("and", "xor")]
    words = [GENERATOR.integers(0, 2**32, (32, n), dtype=np.uint32) for n in (4, 2, 4)]
    names = [
        (f"mma.sync.aligned.m{m}n8k{k}.row.col.s32.b1.b1.s32.{op}.popc OPERANDS;", counts(m, k, "b1", "s32"))
        for m, k, op in forms
    ]
    got = family(emulator, names, *words)
    for result, (m, k, op) in zip(got, forms, strict=True):
        n = counts(m, k, "b1", "s32")
        left, right = matrices(words[0][:, : n[1]].copy(), words[1][:, : n[2]].copy(), m, k, "b1", "b1")
        both = (left[:, :, None] & right[None]) if op == "and" else (left[:, :, None] ^ right[None])
        want = both.sum(1)[places(m)].astype(np.uint32) + words[2][:, : m // 4]
        assert (result[:, : m // 4] == want).all(), (m, k, op)
    doubles = [GENERATOR.integers(-99, 99, (32, n)).astype(np.float64) + 2.0**-12 for n in (8, 4, 4)]
    forms = [(8, 4, ""), (16, 4, ""), (16, 4, ".rn"), (16, 8, ""), (16, 16, "")]
    got = doubles_family(emulator, forms, doubles)
    for result, (m, k, _) in zip(got, forms, strict=True):
        left, right = (x.view(np.uint32) for x in doubles[:2])
        left, right = matrices(left[:, : m * k // 16].copy(), right[:, : k // 2].copy(), m, k, "f64", "f64")
        want = doubles[2][:, : m // 4].copy()
        rows, columns = places(m)
        for each in range(k):  # exact: each product and sum has at most 53 bits
            want += left[rows, each] * right[each, columns]
        assert (result[:, : m // 4] == want).all(), (m, k)


def doubles_family(emulator, forms, doubles):
    """The same as `family` for registers of 64 bits."""
    lines = ["mov.u32 %r1, %tid.x; .reg .b64 a<16>, b<16>, c<16>, d<16>, at;"]
    for letter, values in zip("abc", doubles, strict=True):
        lines.append(f"mul.wide.u32 at, %r1, {8 * values.shape[1]}; add.s64 at, at, %rd_{letter};")
        lines += [f"ld.global.u64 {letter}{i}, [at+{8 * i}];" for i in range(values.shape[1])]
    lines.append("mul.wide.u32 at, %r1, 32; add.s64 at, at, %rd_o;")
    for n, (m, k, mode) in enumerate(forms):
        sizes = m // 4, m * k // 32, k // 4, m // 4
        vectors = ["{" + ",".join(f"{x}{i}" for i in range(size)) + "}" for x, size in zip("dabc", sizes, strict=True)]
        lines.append(f"mma.sync.aligned.m{m}n8k{k}.row.col.f64.f64.f64.f64{mode} {','.join(vectors)};")
        lines += [f"st.global.u64 [at+{1024 * n + 8 * i}], d{i};" for i in range(m // 4)]
    return emulator.run("\n".join(lines), doubles, (len(forms), 32, 4), np.float64)


MOVES = """
	mov.u32 %r1, %tid.x; mov.u32 %r2, block; shl.b32 %r3, %r1, 4; add.u32 %r4, %r2, %r3;
	mul.wide.u32 %rd1, %r1, 16; add.s64 %rd2, %rd_a, %rd1; ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd2];
	add.s64 %rd3, %rd_o, %rd1;
"""
BLOCK = ".shared .align 16 .b8 block[512];"
LOADS = [("m16n16", n, source) for n in (1, 2) for source in ("b8", "b8x16.b6x16_p32", "b8x16.b4x16_p64")]
LOADS += [("m8n16", n, source) for n in (1, 2, 4) for source in ("b8x16.b6x16_p32", "b8x16.b4x16_p64")]


def test_ldmatrix_of_bytes(emulator):
    """m8n16: four bytes of a row for each lane. m16n16: four rows of column g, and then of column g + 8."""
    body = MOVES + "\tst.shared.v4.u32 [%r4], {%r5, %r6, %r7, %r8}; bar.warp.sync -1;\n"
    for i, (shape, n, source) in enumerate(LOADS):
        registers = [f"%r{20 + j}" for j in range(n * (2 if shape == "m16n16" else 1))]
        trans = ".trans" if shape == "m16n16" else ""
        body += "\tmov.u32 %r20, 0; mov.u32 %r21, 0; mov.u32 %r22, 0; mov.u32 %r23, 0;\n"
        body += f"\tldmatrix.sync.aligned.{shape}.x{n}{trans}.shared.{source} {{{', '.join(registers)}}}, [%r4];\n"
        body += f"\tst.global.v4.u32 [%rd3+{512 * i}], {{%r20, %r21, %r22, %r23}};\n"
    rows = GENERATOR.integers(0, 256, (32, 16)).astype(np.uint8)
    got = emulator.run(body, [rows], (len(LOADS), 32, 16), np.uint8, shared=BLOCK, target="sm_120a")
    for result, (shape, n, source) in zip(got, LOADS, strict=True):
        width = {"b8": 8, "b8x16.b6x16_p32": 6, "b8x16.b4x16_p64": 4}[source]
        ones = np.unpackbits(rows, axis=1, bitorder="little")[:, : 16 * width].reshape(32, 16, width)
        elements = (ones << np.arange(width, dtype=np.uint8)).sum(-1).astype(np.uint8)
        want = np.zeros((32, 16), np.uint8)
        for i in range(n):
            for byte in range(4):
                if shape == "m8n16":
                    want[:, 4 * i + byte] = elements[8 * i + G, 4 * Q + byte]
                else:
                    for half in range(2):
                        want[:, 8 * i + 4 * half + byte] = elements[16 * i + 4 * Q + byte, G + 8 * half]
        assert (result == want).all(), (shape, n, source)


# CuTe's Copy_Traits<SM100_U8x..._STSM_T>: (thread, value) to a bit of rows of 16 bytes.
def test_stmatrix_of_bytes_and_movmatrix(emulator):
    body = MOVES
    for i, n in enumerate((1, 2, 4)):
        names = ", ".join(f"%r{5 + j}" for j in range(n))
        body += "\tbar.warp.sync -1; st.shared.v4.u32 [%r4], {%r1, %r1, %r1, %r1}; bar.warp.sync -1;\n"
        body += f"\tstmatrix.sync.aligned.m16n8.x{n}.trans.shared.b8 [%r4], {{{names}}}; bar.warp.sync -1;\n"
        body += "\tld.shared.v4.u32 {%r20, %r21, %r22, %r23}, [%r4];\n"
        body += f"\tst.global.v4.u32 [%rd3+{512 * i}], {{%r20, %r21, %r22, %r23}};\n"
    body += "\tmovmatrix.sync.aligned.m8n8.trans.b16 %r20, %r5; st.global.u32 [%rd3+1536], %r20;\n"
    words = GENERATOR.integers(0, 2**32, (32, 4), dtype=np.uint32)
    got = emulator.run(body, [words], (4, 32, 16), np.uint8, shared=BLOCK, target="sm_120a")
    for result, n in zip(got, (1, 2, 4), strict=False):
        want = np.repeat(LANES.astype(np.uint32), 4).view(np.uint8).reshape(32, 16)
        for lane in range(32):
            for i in range(n):
                for byte in range(4):
                    bit = lane % 4 * 256 + lane // 4 * 8 + byte % 2 * 128 + byte // 2 * 64 + i * 1024
                    want[bit // 128, bit % 128 // 8] = words[lane, i] >> (8 * byte) & 255
        assert (result == want).all(), n
    matrix = words[:, 0].copy().view(np.uint16).reshape(8, 8)
    moved = got[3].view(np.uint32)[:, 0].copy().view(np.uint16).reshape(8, 8)
    assert (moved == matrix.T).all()
