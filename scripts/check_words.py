#!/usr/bin/env python3
"""Counts home-made words where the field has a word of its own (CONTRIBUTING.md, "Words"), in comments, messages and names.

usage: check_words.py [--where WORD] [--lower | --record]

Names are split at _ and capitals. words_left.json holds how many of each word a room may still have; what it does not list
is 0, so that a word that has left a room stays out of it. Exit status 1 where a room has more than that.

--where WORD   lists the lines that count
--lower        lowers words_left.json to what is counted, and raises nothing: after clearing a room
--record       writes words_left.json as counted: after files have moved between rooms
"""

import argparse
import collections
import fnmatch
import io
import json
import pathlib
import re
import sys
import tokenize
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
LEFT = ROOT / "scripts/words_left.json"
TOPS = ("src", "include", "cli", "python")
GPU = ("src/backend/",)


class Word(NamedTuple):
    forms: str  # blank-separated, lower case
    instead: str  # the field's word
    rooms: tuple[str, ...] = TOPS  # where it counts
    names_only: bool = False  # good English in a sentence, but not in a name


WORDS = {
    "line": Word("line lines", "token (of the layer's input), row (of a GEMM's activations)"),
    "choice": Word("choice choices", "assignment"),
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
}
# Types that may hold device pointers are not the host's.
NAMES = ("HostCall", "HostPart", "HostBuffers", "HostSteps", "HostActivations")


class Allowed(NamedTuple):
    word: str
    files: str  # a pattern over paths
    context: str  # a regular expression: what it matches on a line does not count
    reason: str


ALLOWED = [
    Allowed("line", "*", r"\bgetline\b|\blog_line\b|__LINE__|\bcommand[ -]lines?\b", "names of other things"),
    Allowed("line", "*", r"(?i)\bcache[ _-]?lines?\b|kCacheLine\w*", "of a cache"),
    Allowed("line", "src/moe/log*", r"\w*[Ll]ines?\w*", "of a log"),
    Allowed("line", "src/core/memory_nodes.cpp", r"\bline\b", "of a file under /sys"),
    Allowed("line", "src/moe/registry.cpp", r"\blines?\b", "of /proc/cpuinfo, and of the list of backends"),
    Allowed("line", "*", r"\b(one|several) lines?\b", "of text: messages and tables"),
    Allowed("line", "cli/*", r"\w*[Ll]ines?\w*", "a line of text on a terminal"),
    Allowed("choice", "*", r"(?i)\b(named|numeric)[ _]?choices?\b|\bNumericChoices\b", "of the numeric contract"),
    Allowed("choice", "cli/verbs/*", r"\w*[Cc]hoices?\w*", "of the numeric contract, and of a backend (explain)"),
    Allowed("unit", "*", r"\bcompute_units\b", "multiprocessors or cores, of either kind of device"),
    Allowed("few", "*", r"\bfewer\b|\bfewest\b", "English"),
]


def room_of(path):
    """src/backend/cpu of src/backend/cpu/kernels/x.cpp; include of include/nvfp4_moe/x.h."""
    parts = path.split("/")[:-1]
    if parts[0] in ("src", "cli", "python"):
        return "/".join(parts[: 3 if parts[:2] == ["src", "backend"] else 2])
    return parts[0]


def prose_and_code_cpp(line):
    code, prose = [], []
    for match in re.finditer(r'"(?:\\.|[^"\\])*"|//.*|[^"/]+|.', line):
        text = match.group(0)
        (prose if text.startswith(('"', "//")) else code).append(text)
    return " ".join(prose), "".join(code)


def prose_and_code(path, text):
    """(number, line, prose, code) of each line."""
    lines = text.splitlines()
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
    """(lower-case word, whether it is part of a name)."""
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
    """(word, line number, line) of every home-made word that is not allowed where it stands."""
    allowed = [entry for entry in ALLOWED if fnmatch.fnmatch(path, entry.files)]
    for number, line, prose, code in prose_and_code(path, text):
        if not MAY_COUNT.search(line) or line.lstrip().startswith("#include"):
            continue
        stripped = {}  # without what is allowed, by word
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


def count():
    counts = collections.defaultdict(collections.Counter)
    places = []
    for top in TOPS:
        for file in sorted((ROOT / top).rglob("*")):
            if file.suffix not in (".h", ".hpp", ".cpp", ".cu", ".cuh", ".py", ".c", ".inc"):
                continue
            path = file.relative_to(ROOT).as_posix()
            for word, number, line in found_in(path, file.read_text()):
                counts[room_of(path)][word] += 1
                places.append((word, f"{path}:{number}: {line}"))
    return counts, places


def write(table):
    rooms = {room: {word: number for word, number in sorted(words.items()) if number} for room, words in table.items()}
    lines = [f"  {json.dumps(room)}: {json.dumps(words)}" for room, words in sorted(rooms.items()) if words]
    LEFT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main():
    parser = argparse.ArgumentParser(description="Counts home-made words by room.")
    parser.add_argument("--where", metavar="WORD")
    changes = parser.add_mutually_exclusive_group()
    changes.add_argument("--lower", action="store_true")
    changes.add_argument("--record", action="store_true")
    options = parser.parse_args()
    counts, places = count()
    if options.where:
        print("\n".join(place for word, place in places if word == options.where))
        return 0
    left = json.loads(LEFT.read_text()) if LEFT.exists() else {}
    if options.record:
        write(counts)
        return 0
    more = [
        f'{room}: {number} of "{word}", {left.get(room, {}).get(word, 0)} at most (say: '
        f"{WORDS[word].instead if word in WORDS else 'a name without Host'}); check_words.py --where {word}"
        for room, words in sorted(counts.items())
        for word, number in sorted(words.items())
        if number > left.get(room, {}).get(word, 0)
    ]
    if options.lower:
        write(
            {
                room: {word: min(most, counts[room][word]) for word, most in words.items()}
                for room, words in left.items()
            }
        )
    for top in TOPS:
        by_word = collections.Counter()
        for room, words in counts.items():
            by_word.update(words if room.split("/")[0] == top else {})
        listed = ", ".join(f"{word} {number}" for word, number in by_word.most_common())
        print(f"home-made words in {top}: {by_word.total()}" + (f" ({listed})" if listed else ""))
    print("\n".join(more), end="\n" if more else "")
    return 1 if more else 0


if __name__ == "__main__":
    sys.exit(main())
