"""scripts/check_ptxas.py on trial: reports and objects as nvcc leaves them, and what must fail."""

from __future__ import annotations

import struct

import check_ptxas
import pytest

KERNEL = "_ZN5sm12018sm120_gemm1_kernelILm0EEEv"
PRODUCT, OTHER = 0x7160A1586454747F, 0x000000000000784A


def cubin(kernels: dict[str, list[int]]) -> bytes:
    """A file of device code: one section of instructions, 16 bytes each, for each kernel."""
    names, sections, body = b"\0", [], b""
    for name, words in {**{f".text.{k}": w for k, w in kernels.items()}, ".shstrtab": []}.items():
        code = b"".join(struct.pack("<2Q", word, 0) for word in words)
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
        f"    0 bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 68 registers, used 2 barriers\n"
        for kernel in kernels
    )


@pytest.fixture
def check(request, tmp_path, monkeypatch, capsys):
    """Runs the check over one object and its report: its exit code and what it prints."""
    names = request.param if hasattr(request, "param") else ["sm120_gemm1_kernel"]
    monkeypatch.setattr(check_ptxas, "LISTED", names)
    needs = {name: check_ptxas.NEEDS_BLOCK_SCALED_MMA[name] for name in names}
    monkeypatch.setattr(check_ptxas, "NEEDS_BLOCK_SCALED_MMA", needs)
    monkeypatch.setattr("sys.argv", ["check_ptxas", str(tmp_path)])

    def run(code: bytes, text: str) -> tuple[int, str]:
        (tmp_path / "gemm1.cu.o").write_bytes(b"\x7fELF of the host".ljust(96, b"\0") + code)
        (tmp_path / "gemm1.cu.o.report").write_text(text)
        return check_ptxas.main(), capsys.readouterr().out

    return run


def test_products_are_counted_by_kernel(check):
    code, out = check(cubin({KERNEL: [OTHER, PRODUCT, PRODUCT], "_Z4packv": [OTHER]}), report(KERNEL))
    assert code == 0
    assert "sm120_gemm1_kernel: block-scaled products 2\n" in out


def test_a_kernel_without_products_fails(check):
    second = KERNEL.replace("Lm0", "Lm1")
    code, out = check(cubin({KERNEL: [PRODUCT], second: [OTHER]}), report(KERNEL, second))
    assert code == 1
    assert "block-scaled products in the machine code: [1, 0]" in out


# As ptxas has written them: kind::mxf4nvf4 with blocks of 16, and the kinds of other formats.
@pytest.mark.parametrize("check", [["sm100_gemm1_kernel"]], indirect=True)
@pytest.mark.parametrize("word, products", [(0x801E060C0A0075EA, 1), (0xC006040C0A0075EA, 0), (0x00FF040A080075EA, 0)])
def test_tcgen05_of_another_kind_is_no_product(check, word, products):
    kernel = KERNEL.replace("sm120", "sm100")
    code, out = check(cubin({kernel: [OTHER, word]}), report(kernel))
    assert code == 1 - products
    assert ("block-scaled products 1" in out) == bool(products)


def test_machine_code_that_is_not_to_be_found_fails(check):
    for code in (b"", cubin({})):
        assert check(code, report(KERNEL))[0] == 1


def test_spills_fail(check):
    assert check(cubin({KERNEL: [PRODUCT]}), report(KERNEL, spills=8))[0] == 1


def test_a_kernel_without_a_report_fails(check):
    assert check(cubin({KERNEL: [PRODUCT]}), "")[0] == 1
