#!/usr/bin/env python3
"""Finds home-made words in comments, messages, names and docs, if the field has its own word (CONTRIBUTING.md,
"Words").

Names are split at _ and capitals. Prints the lines and exits with 1 if there are any. ALLOWED lists words that mean
something else in some files.
"""

import collections
import fnmatch
import io
import pathlib
import re
import sys
import tokenize
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
CODE = ("src", "include", "cli", "python")
PRODUCT = (*CODE, "docs")
TOPS = (*PRODUCT, "tests")
OWN_TESTS = "tests/python/test_checks.py"  # its examples contain the words
GPU = ("src/backend/",)
RANKS = (  # code and docs of the exchange
    "src/exchange/",
    "src/parallel/",
    "src/backend/",
    "src/core/peer_memory.h",
    "include/",
    "docs/how-to/expert-parallel.md",
    "docs/explanation/expert-parallel.md",
    "tests/exchange/",
    "tests/cuda/",
)


class Word(NamedTuple):
    forms: str  # blank-separated, lower case
    instead: str  # the field's word
    rooms: tuple[str, ...] = PRODUCT  # the folders in which it is checked
    names_only: bool = False  # good English in a sentence, but not in a name


WORDS = {
    "line": Word(
        "line lines", "token (of the layer's input), row (of a GEMM's activations)", (*CODE, "docs/explanation/cpu.md")
    ),
    "choice": Word("choice choices", "assignment", CODE),
    "piece": Word("piece pieces", "split-K partial, k-block, range"),
    "unit": Word("unit units", "work tile", GPU),
    "chunk": Word("chunk chunks", "tile, k-block", GPU),
    "slab": Word("slab slabs", "tile, stage"),
    "team": Word("team teams", "cta, warpgroup"),
    "eight": Word("eight eights", "vec8", names_only=True),
    "place": Word("place places", "offset, address", GPU, names_only=True),
    "widen": Word("widen widens widened widening", "dequantize"),
    "flagged": Word("flagged", "nonfinite"),
    "told": Word("told", "reported, said to be"),
    "tell": Word("tell tells", "report", names_only=True),
    "noticed": Word("noticed", "reported, detected"),
    "carve": Word("carve carves carved carving", "place (in an arena)"),
    "begun": Word("begun", "stage state, barrier phase", GPU),
    "sums": Word("sums", "accumulator, partial", GPU),
    "finish": Word("finish finishes", "epilogue", GPU, names_only=True),
    "box": Word("box boxes", "TMA tile", GPU),
    "few": Word("few", "small batch", GPU, names_only=True),
    "here": Word("here", "fused routing", GPU, names_only=True),
    "home": Word("home homes", "source rank", TOPS),
    "owner": Word("owner owners", "expert rank", RANKS),
    "record": Word("record records", "packet", RANKS),
    "mark": Word("mark marks marked", "flag, event", RANKS),
    "announce": Word("announce announces announced announcement announcements", "exchange counts", TOPS),
    "meet": Word("meet meets met meeting meetings", "barrier", TOPS),
    "hello": Word("hello", "handshake", TOPS),
    "beat": Word("beat beats", "heartbeat", TOPS),
    "look": Word("look looks looked looking", "poll, check, read", TOPS),
    "hear": Word("hear hears heard", "receive, detect", TOPS),
}
# Types that may hold device pointers must not be called Host.
NAMES = ("HostCall", "HostPart", "HostBuffers", "HostSteps", "HostActivations")


class Allowed(NamedTuple):
    word: str
    files: str  # a pattern over paths
    context: str  # a regular expression; its matches on a line are ignored
    reason: str


ALLOWED = [
    Allowed("line", "*", r"\bgetline\b|\blog_line\b|__LINE__|\bcommand[ _-]lines?\b", "names of other things"),
    Allowed("line", "*", r"(?i)\bcache[ _-]?lines?\b|kCacheLine\w*", "of a cache"),
    Allowed("line", "src/moe/env.h", r"\w*[Ll]ines?\w*", "of a log"),
    Allowed("line", "src/core/memory_nodes.cpp", r"\bline\b", "of a file under /sys"),
    Allowed("line", "src/moe/registry.cpp", r"\blines?\b", "of /proc/cpuinfo, and of the list of backends"),
    Allowed("line", "*", r"\b(one|several) lines?\b", "of text: messages and tables"),
    Allowed("line", "cli/*", r"\w*[Ll]ines?\w*", "a line of text on a terminal"),
    Allowed("line", "src/convert/quantize_checkpoint.cpp", r"\blines?\b", "of JSON lines"),
    Allowed("line", "src/safetensors/file.cpp", r"\blines?\b", "of /proc/self/smaps"),
    Allowed("line", "src/io/files.*", r"\bbreak a line\b|\bline and paragraph separators\b", "of text"),
    Allowed("line", "src/io/json_builder.cpp", r"\bat line 1\b", "of text, quoted from a message of nlohmann::json"),
    Allowed(
        "chunk",
        "src/backend/cpu/*",
        r"\w*[Cc]hunks?\w*",
        "64 values along K of a packed panel (docs/explanation/layouts.md)",
    ),
    Allowed("choice", "*", r"(?i)\b(named|numeric)[ _]?choices?\b|\bNumericChoices\b", "of the numeric contract"),
    Allowed("choice", "python/nvfp4_moe/sglang/*", r"(?i)\w+_choices\b", "of SGLang's command line"),
    Allowed("choice", "python/nvfp4_moe/_ranks.py", r"\bchoices\b", "an argument of argparse"),
    Allowed("choice", "python/nvfp4_moe/_ranks.py", r"\bchoices=", "argparse's"),
    Allowed("choice", "cli/verbs/*", r"\w*[Cc]hoices?\w*", "of the numeric contract, and of a backend (explain)"),
    Allowed("unit", "*", r"\bcompute_units\b", "multiprocessors or cores, of either kind of device"),
    Allowed(
        "look", "*", r"\w*look[ _-]?up\w*|look(s|ed) up|\blook-(ahead|behind)\b", "in a table; of regular expressions"
    ),
    Allowed("look", "src/checkpoint/*reg*", r"\b(k?look|looks)\b", "of regular expressions"),
    Allowed("record", "*", r"\bcudaEventRecord\b|\brecordproperty\b", "CUDA's and GoogleTest's"),
    Allowed("record", "docs/explanation/expert-parallel.md", r"\bbench/results\b.*", "of a measurement"),
    Allowed("home", "tests/python/test_acceptance.py", r"/home/|\bhome_folder\b", "a user's folder"),
    Allowed(
        "home", "tests/acceptance/acceptance_report.py", r"\bhome_folder\b|\bhome\(\)|\bPath.home\b", "a user's folder"
    ),
    Allowed("line", "docs/explanation/cpu.md", r"a file and two lines", "of text"),
    Allowed("line", "src/backend/cuda/ptx/wait_limit.cuh", r"\b__builtin_LINE\b", "the compiler's"),
    Allowed("home", "*", r"\bXDG_CACHE_HOME\b|\"HOME\"", "variables of the system"),
    Allowed("home", "tests/*", r"\$HOME\b|\bCUDA_HOME\b|\bhome_made\b", "a user's folder, CUDA's, and these words"),
    Allowed("few", "*", r"\bfewer\b|\bfewest\b", "English"),
]


def prose_and_code_cpp(line):
    code, prose = [], []
    for match in re.finditer(r'"(?:\\.|[^"\\])*"|//.*|[^"/]+|.', line):
        text = match.group(0)
        (prose if text.startswith(('"', "//")) else code).append(text)
    return " ".join(prose), "".join(code)


def prose_and_code(path, text):
    """Yields (number, line, prose, code) for each line."""
    lines = text.splitlines()
    if path.endswith(".md"):
        yield from ((number, line, line, "") for number, line in enumerate(lines, 1))
        return
    if not path.endswith(".py"):
        for number, line in enumerate(lines, 1):
            yield number, line, *prose_and_code_cpp(line)
        return
    names = collections.defaultdict(list)
    prose = collections.defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            names[token.start[0]].append(token.string)
        elif token.type in (tokenize.COMMENT, tokenize.STRING):
            for at, part in enumerate(token.string.splitlines(), token.start[0]):
                prose[at].append(part)
    for number, line in enumerate(lines, 1):
        yield number, line, " ".join(prose[number]), " ".join(names[number])


def parts_of(name):
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def words_in(prose, code):
    """Yields (lower-case word, whether it is part of a name)."""
    for text, is_code in ((prose, False), (code, True)):
        for name in re.findall(r"[A-Za-z_][A-Za-z0-9_]*", text):
            parts = parts_of(name)
            for part in parts:
                yield part, is_code or len(parts) > 1
            if name in NAMES:
                yield name, True


FORMS = {form: word for word, entry in WORDS.items() for form in entry.forms.split()} | {name: name for name in NAMES}
MAY_COUNT = re.compile("|".join(sorted(FORMS, key=len, reverse=True)), re.IGNORECASE)


def found_in(path, text):
    """Yields (word, line number, line) for every home-made word that is not allowed there."""
    if path == OWN_TESTS:
        return
    allowed = [entry for entry in ALLOWED if fnmatch.fnmatch(path, entry.files)]
    for number, line, prose, code in prose_and_code(path, text):
        if not MAY_COUNT.search(line) or line.lstrip().startswith("#include"):
            continue
        stripped = {}  # the line without allowed contexts, by word
        for word in {entry.word for entry in allowed}:
            contexts = "|".join(f"(?:{entry.context})" for entry in allowed if entry.word == word).replace("(?i)", "")
            stripped[word] = [re.sub(contexts, " ", half, flags=re.IGNORECASE) for half in (prose, code)]
        for part, in_name in words_in(prose, code):
            word = FORMS.get(part)
            entry = WORDS.get(word)
            if word is None or (entry and (not path.startswith(entry.rooms) or (entry.names_only and not in_name))):
                continue
            if word in stripped and part not in {other for other, _ in words_in(*stripped[word])}:
                continue
            yield word, number, line.strip()


def main():
    found = []
    for top in TOPS:
        for file in sorted((ROOT / top).rglob("*")):
            if file.suffix not in (".h", ".hpp", ".cpp", ".cu", ".cuh", ".py", ".c", ".inc", ".md"):
                continue
            path = file.relative_to(ROOT).as_posix()
            for word, number, line in found_in(path, file.read_text()):
                instead = WORDS[word].instead if word in WORDS else "a name without Host"
                found.append(f'{path}:{number}: "{word}" (say: {instead}): {line}')
    print("\n".join([*dict.fromkeys(found), f"home-made words: {len(found)}"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
