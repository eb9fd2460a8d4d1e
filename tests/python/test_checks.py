"""Tests of the checks of ./dev check: each must find the faults it is made for, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import check_boundaries
import check_docs
import check_includes
import check_prose
import check_rooms
import check_words
import cli_reference
import pytest


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("src/core/a.h", "// The lines of the layer.\n", ["line"]),
        ("src/core/a.h", "int lines = 0;  // of the command line\n", ["line"]),  # the allowed one hides nothing
        ("src/backend/cuda/a.cuh", "// chunks of K\nconstexpr int64_t kChunkBytes = 576;\n", ["chunk", "chunk"]),
        ("python/nvfp4_moe/a.py", 'def say_hello(last_beat):\n    """Looks at it."""\n', ["hello", "beat", "look"]),
        ("tests/exchange/a_test.cpp", "TEST(Ranks, MarksOfRecords) {}\n", ["mark", "record"]),
        # Names of other things, plain senses, and folders in which a word means something else.
        ("src/core/a.h", "// On the command line; a cache line; std::getline(file, text);\n", []),
        ("src/core/a.h", '#include "core/line.h"\nint underline_online = 0;\n', []),
        ("src/backend/cpu/panel.h", "// chunks of 576 bytes\nconstexpr int64_t kChunkBytes = 576;\n", []),
        ("src/backend/cuda/a.cu", "cudaEventRecord(event, stream);\n", []),
    ],
)
def test_words(path, text, found):
    assert [word for word, _, _ in check_words.found_in(path, text)] == found


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """An empty repository."""
    for module in (check_words, check_rooms, check_includes, check_prose):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(check_prose, "CEILINGS", {})
    monkeypatch.setattr(
        check_rooms,
        "tracked",
        lambda *tops: sorted(
            str(file.relative_to(tmp_path)) for top in tops or ("src",) for file in (tmp_path / top).rglob("*.h")
        ),
    )
    monkeypatch.setattr("sys.argv", ["check"])
    return tmp_path


def write(tree, path, text):
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_text(text)


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("src/a.h", "int a;  // null where there is none\n", ["where", "is none"]),
        ("src/a.h", "// Written behind it,\n// by\n// turns.\n", ["behind", "by turns"]),
        ("src/a.h", "int a;  // Of a layer.\nint b;  // What it has.\n", ["What or Of", "What or Of"]),
        ("src/a.h", f'f("{"a" * 96}");\n', ["long line"]),
        ("python/a.py", '"""Says so."""\n\n\ndef f():\n    """Of f, besides."""\n', ["says", "beside", "What or Of"]),
        ("docs/a.md", "As\nso\nmany as\n", ["so many"]),
        ("docs/a.md", "word\n" * 121, ["long paragraph"]),
        # Allowed: code, strings, sentences that go on, tables, lists and links.
        ("src/a.h", 'int where = says("alone");  // if so\nconst char kText[] = R"(// behind)";\n', []),
        ("src/a.h", "// One of two.\n// What follows belongs to it.\nconst int n = 1'000;  // a host's\n", []),
        ("docs/a.md", "Run `--where behind`:\n```\nalone, anew\n```\n", []),
        ("docs/a.md", "| " + "word " * 121 + "|\n\n" + f"[a](says/{'a' * 120}.md)\n", []),
    ],
)
def test_prose(path, text, found):
    assert [rule for rule, _ in check_prose.found_in(path, text) if rule not in ("words", "if")] == found


def test_prose_is_counted_by_area_up_to_a_ceiling(tree, capsys, monkeypatch):
    write(tree, "src/a.h", "// null if there is one\n" + "// word\n" * 200)  # few words, so one of a kind is allowed
    write(tree, "src/b.h", "int a;  // where\n")
    assert check_prose.main() == 0
    write(tree, "include/a.h", "// NULL where it is empty\n")  # conditions begin with "if"
    write(tree, "README.md", "A row behind it.\n\nAnd behind another.\n")
    assert check_prose.main() == 1
    assert capsys.readouterr().out == (
        'include: "where" 1 times, at most 0 (check_prose.py --list include)\n'
        'docs: "behind" 2 times, at most 1 (check_prose.py --list docs)\n'
    )
    monkeypatch.setattr(check_prose, "CEILINGS", {"include": {"where": 1}, "docs": {"behind": 2}})
    assert check_prose.main() == 0


def test_rooms_long_files_words_and_the_emulator(tree, capsys):
    write(tree, "src/core/a.h", "// A table.\n" + "int a;\n" * 399)
    write(tree, "src/moe/a.h", '#include "core/a.h"\n')
    write(tree, "src/judge/a.h", '#include "core/a.h"\n#include "moe/a.h"\n')
    assert check_rooms.main() == 0
    write(tree, "src/core/a.h", "// A table.\n" + "int a;\n" * 400)
    write(tree, "src/core/b.h", '#include "judge/a.h"\n')
    assert check_rooms.main() == 1
    out = capsys.readouterr().out
    assert "src/core/a.h: 401 lines" in out
    assert "src/core and src/judge include each other" in out and "src/core/b.h includes judge/a.h" in out
    write(tree, "src/core/a.h", "// A table.\n// Long because it has one line a code.\n" + "int a;\n" * 400)
    write(tree, "src/core/b.h", "")
    assert check_rooms.main() == 0
    # Words of check_words, and the emulator, which knows nothing of the library.
    (tree / "src/judge/a.h").unlink()
    assert check_words.main() == check_includes.main() == 0
    write(tree, "cli/a.h", "int choice;  // a choice\n")
    write(tree, "ptxemu/cudart/a.h", '#include "core/status.h"\n')
    write(tree, "ptxemu/README.md", "For nvfp4-moe.\n")
    assert check_words.main() == check_includes.main() == 1
    out = capsys.readouterr().out
    assert 'cli/a.h:1: "choice" (say: assignment): int choice;  // a choice\n' in out
    assert "ptxemu/README.md:1: ptxemu/ may not name the library\n" in out
    assert "ptxemu/cudart/a.h:1: ptxemu/ may not include core/status.h\n" in out


def test_two_files_may_not_define_a_type_of_one_name(tree, capsys):
    text = "namespace a::b {\n\nstruct Files {\n};\n\n}  // namespace a::b\n"
    write(tree, "src/io/files.h", text)
    write(tree, "src/moe/files.h", text.replace("a::b", "a::c"))
    write(tree, "src/moe/files.cpp", text.replace("a::b", "").replace("namespace  {", "namespace {"))
    assert check_includes.main() == 0
    write(tree, "src/moe/other.cpp", text)
    assert check_includes.main() == 1
    assert capsys.readouterr().out == "src/moe/other.cpp:3: a::b::Files is also defined at src/io/files.h:3\n"


# ---- tests, links and examples of the docs

PAGE = """
| feature | on every GPU backend | `sm90` alone |
|---|---|---|
| one | `Steps.Every` over `w4a4` | `Sm90Layer.Bits` |
"""
SOURCES = """
TEST_P(Steps, Every) {
INSTANTIATE_TEST_SUITE_P(Backends, Steps, ::testing::ValuesIn(test::judged_backends()),
TEST_F(Sm90Layer, Bits) {
ATTACK_TEST_P(kGpu, Memory, Out) {
"""


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("`Steps.Every`", "`Steps.Every`", []),
        ("`Steps.Every`", "`Steps.Evry`", ["no test Steps.Evry"]),
        ("`Steps.Every`", "`Memory.Out`", ["Memory.Out does not run for every backend"]),
        ("`Sm90Layer.Bits`", "`Memory.Out`", []),
    ],
)
def test_tests_that_a_page_names_exist(old, new, wrong):
    page = PAGE.replace(old, new)
    assert list(check_docs.wrong_tests(page, *check_docs.tests_in([SOURCES]), '{"w4a4", ...}')) == wrong


STUB = """
class Layer:
    def run(self, hidden: object, out: object = None) -> object: ...
"""


@pytest.mark.parametrize(
    ("blocks", "wrong"),
    [
        (["layer = nvfp4_moe.MoeLayer.from_bf16(c, up=u, down=d)\nlayer.run(x, out=y)"], []),
        (["from nvfp4_moe import MoeLayer as L\nL.from_fp64(x)"], ["no L.from_fp64"]),
        (["f(nvfp4_moe.quantize(x, modes=1))"], ["nvfp4_moe.quantize has no argument modes"]),
        # The blocks of a page share their names.
        (["l = nvfp4_moe.MoeLayer.from_bf16(c, up=u, down=d)", "if x:\n    print(l.rum(x))"], ["no l.rum"]),
        (["layer.run(x)\nf(", "ok()"], ["Python block: '(' was never closed: f("]),
    ],
)
def test_python_blocks(tmp_path, blocks, wrong):
    (tmp_path / "_core.pyi").write_text(STUB)
    assert list(check_docs.wrong_python(blocks, check_docs.Api(tmp_path / "_core.pyi"))) == wrong


HELP = """Float checkpoint to NVFP4
Options:
  -h,--help                   Print this help
  --search TEXT=max           max or mse
  --a-long-one INT:INT in [0 - 4096]
                              Not --this
"""


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        ("```sh\nnvfp4-moe quantize IN --a-long-one 3 \\\n  --search=max | tee log --bogus\n./dev bench\n```", []),
        ("```json\nnvfp4-moe quantise IN\n```\nnvfp4-moe quantise, in words; `nvfp4-moe: error: no`", []),
        ("```bash\nnvfp4-moe quantize IN \\\n  --serch max\n```", ["nvfp4-moe quantize has no option --serch"]),
        ("```sh\n./dev benhc\nnvfp4-moe quantise\n```", ["no verb ./dev benhc", "no verb nvfp4-moe quantise"]),
    ],
)
def test_commands(page, wrong):
    assert sorted(check_docs.wrong_commands(page, ["bench"], {"quantize": check_docs.options_of(HELP)})) == wrong


@pytest.mark.parametrize(
    ("entry", "cells"),
    [
        ("--search max|mse|sweep=max", r"`--search max\|mse\|sweep` | How. Default `max`"),
        ("--device cpu|cuda:N=cpu", r"`--device cpu\|cuda:N` | How. Default `cpu`"),
        ("--threads INT:INT in [0 - 4096]", "`--threads INT` | How. 0 to 4096"),
        ("-h,--help", "`-h, --help` | How"),
    ],
)
def test_rows_of_the_options_page(entry, cells):
    assert cli_reference.row(entry, "How") == f"| {cells} |"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[a](b.md), [a](b.md#2-one-a_b-and-more), [a](#here), [a](https://example.org#x)\n\n# Here", []),
        ("```\n[a](c.md)\n```\n[a](c.md#two)", ["link to c.md, which does not exist"]),
        ("[a](#there)\n\n# Here\n```\n# There\n```", ["link to #there, which has no such heading"]),
    ],
)
def test_links(tmp_path, text, wrong):
    (tmp_path / "a.md").write_text(text)
    (tmp_path / "b.md").write_text("# B\n\n## 2. One: `a_b`, [and](a.md) more\n")
    assert list(check_docs.broken_links(tmp_path / "a.md")) == wrong


def test_a_heading_that_the_site_lacks(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# Quick start\n")
    page = tmp_path / "docs/page.md"
    page.write_text("[a](../README.md)")
    assert not list(check_docs.broken_links(page, tmp_path))
    page.write_text("[a](../README.md#quick-start)")
    assert len(list(check_docs.broken_links(page, tmp_path))) == 1


# ---- a function of the C interface that can throw, and planted faults

ONE = "  return api::guarded([&] { return work(a, b); });\n"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (ONE, []),
        ("  return work(a, b);\n", ["nvfp4_moe_one"]),
        ("  work();\n" + ONE, ["nvfp4_moe_one"]),
        (ONE + "  work(c);\n", ["nvfp4_moe_one"]),
    ],
)
def test_functions_that_are_more_than_one_guarded_call_are_named(body, named):
    text = f"nvfp4_moe_status nvfp4_moe_one(int64_t a,\n  int64_t b) {{\n{body}}}\n"
    assert check_boundaries.unguarded(text) == named
    assert check_boundaries.main() == 0, "the library itself"


def test_every_planted_fault_has_one_place():
    root = Path(__file__).resolve().parents[2]
    lists = sorted((root / "tests/planted_faults").glob("*.json"))
    faults = [fault for path in lists for fault in json.loads(path.read_text())]
    assert len(lists) > 1 and len(faults) > 100
    assert [fault for fault in faults if (root / fault["file"]).read_text().count(fault["find"]) != 1] == []
    assert [fault for fault in faults if fault["find"] == fault["replace"]] == []
