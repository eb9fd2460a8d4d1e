"""Tests tools/check/check_ptxas.py with reports and objects in nvcc's form, and with ones that must fail.

test_check_ptxas_compiled.py has planted kernels, compiled by a real nvcc.
"""

from __future__ import annotations

import struct

import check_ptxas
import pytest

KERNEL = "_ZN5sm12018sm120_gemm1_kernelILm0EEEv"
PRODUCT, OTHER = (0x7160A1586454747F, 0x004FDE0000043E08), (0x000000000000784A, 0)
MXFP4 = (0x705004040408747F, 0x004FDE0000083E08)  # the same opcode
OF_SM100 = {  # words as nvdisasm -hex gives them
    "UTCOMMA.4X": (0x800C040A080075EA, 0x01C1D80008000006),
    "UTCOMMA.2CTA.4X with A kept": (0x800C040A080075EA, 0x01C1D80008300006),
    "UTCOMMA": (0xC00C040A080075EA, 0x01C1D80008000006),  # MXFP4
    "UTCHMMA": (0x00FF040A080075EA, 0x00E1D80008000006),  # bf16
    "UTCQMMA": (0x000C040A08007DEA, 0x01C1D80008000306),  # FP8
}


def cubin(kernels: dict[str, list[tuple[int, int]]]) -> bytes:
    """A file of device code: one section of instructions, two words each, for each kernel."""
    names, sections, body = b"\0", [], b""
    for name, words in {**{f".text.{k}": w for k, w in kernels.items()}, ".shstrtab": []}.items():
        code = b"".join(struct.pack("<2Q", *pair) for pair in words)
        sections.append((len(names), 64 + len(body), len(code)))
        names += name.encode() + b"\0"
        body += code
    sections[-1] = (sections[-1][0], 64 + len(body), len(names))
    body += names
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<H", header, 18, check_ptxas.ELF_OF_CUDA)
    struct.pack_into("<Q", header, 40, 64 + len(body))
    struct.pack_into("<3H", header, 58, 64, len(sections), len(sections) - 1)
    table = b"".join(struct.pack("<2I4Q", name, 1, 0, 0, at, size).ljust(64, b"\0") for name, at, size in sections)
    return bytes(header) + body + table


def report(*kernels: str, spills: int = 0) -> str:
    return "".join(
        f"ptxas info    : Compiling entry function '{kernel}' for 'sm_120f'\n"
        f"ptxas info    : Function properties for {kernel}\n"
        f"    0 bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 68 registers, used 2 barriers\n"
        for kernel in kernels
    )


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Runs the check over one object and its report, with one listed kernel. Returns its exit code and output."""
    monkeypatch.setattr("sys.argv", ["check_ptxas", str(tmp_path)])

    def run(code: bytes, text: str, listed: str = "sm120_gemm1_kernel") -> tuple[int, str]:
        monkeypatch.setattr(check_ptxas, "LISTED", [listed])
        (tmp_path / "gemm1.cu.o").write_bytes(b"\x7fELF of the host".ljust(96, b"\0") + code)
        (tmp_path / "gemm1.cu.o.report").write_text(text)
        return check_ptxas.main(), capsys.readouterr().out

    return run


CALLED = """ptxas info    : Function properties for _Z4deepPKfi
    0 bytes stack frame, 2300 bytes spill stores, 3788 bytes spill loads
"""
SERIALIZED = [
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ill formed "
    "pipeline stage in the function 'k'\n",
    "ptxas warning : (C7513) some other words\n",
    "ptxas info    : (C7517) warpgroup.wait is injected in around line 11 by compiler to allow use of registers defined "
    "by GMMA in function 'k'\n",
]


def test_a_good_kernel_passes_and_each_fault_of_a_report_fails(check):
    good = cubin({KERNEL: [PRODUCT]})
    assert check(good, report(KERNEL))[0] == 0
    for text, words in (
        (report(KERNEL, spills=8), "8 spilled"),
        (report(KERNEL) + CALLED, "_Z4deepPKfi, which is called: 2300 spilled, 3788 reloaded"),
        *((report(KERNEL) + said, said) for said in SERIALIZED),
        ("", "sm120_gemm1_kernel: in no report"),
    ):
        code, out = check(good, text)
        assert code == 1 and words in out


@pytest.mark.parametrize(
    ("listed", "products", "code"),
    [
        *(("sm100_gemm1_kernel", [OF_SM100[name]], 0 if ".4X" in name else 1) for name in OF_SM100),
        *(("sm100_bf16_gemm1_kernel", [OF_SM100[name]], 0 if name == "UTCHMMA" else 1) for name in OF_SM100),
        ("sm120_gemm1_kernel", [MXFP4], 1),
        ("sm120_gemm1_kernel", [PRODUCT, PRODUCT], 0),
        ("sm120_gemm1_kernel", [], 1),
    ],
)
def test_only_a_kernels_own_products_count(check, listed, products, code):
    mangled = f"_Z{len(listed)}{listed}v"
    found, out = check(cubin({mangled: [OTHER, *products], "_Z4packv": [OTHER]}), report(mangled), listed)
    name = check_ptxas.PRODUCTS[listed].name
    assert found == code
    assert (f"{listed}: {name} {len(products)}\n" if code == 0 else f"{name} in the machine code: [0]") in out


def test_every_kernel_needs_products_and_machine_code(check):
    second = KERNEL.replace("Lm0", "Lm1")
    code, out = check(cubin({KERNEL: [PRODUCT], second: [OTHER]}), report(KERNEL, second))
    assert code == 1 and "in the machine code: [1, 0]" in out
    assert check(b"", report(KERNEL))[0] == check(cubin({}), report(KERNEL))[0] == 1
