"""The reference page of the command line, from the --help of the tool and of each of its verbs."""

import re
import subprocess

from prose import fence, inline

ENTRY = re.compile(
    r"(?P<name>-\S+?(?=[ :=]|$)|[A-Z]+)(?: (?P<type>[A-Z]+|[\w-]+(?:\|[\w:-]+)+))?(?: REQUIRED)?"
    r"(?::[A-Z]+ in \[(?P<limit>.*?)\])?(?:=(?P<default>\S+))?"
)


def help_of(tool):
    """{"": the tool's own --help, verb: the verb's}."""

    def run(*arguments):
        return subprocess.run([tool, *arguments, "--help"], check=True, capture_output=True, text=True).stdout

    own = run()
    verbs = [entry.split()[0] for entry, _ in sections(own)["Subcommands"]]
    return {"": own, **{verb: run(verb) for verb in verbs}}


def sections(text):
    """Parses a --help into {heading: [(entry, description)]}. A long entry has its text on the next line."""
    found, heading = {}, None
    for line in text.splitlines():
        if title := re.match(r"(\w[\w ]*):$", line):
            heading = found.setdefault(title[1], [])
        elif heading is not None and (entry := re.match(r"  (\S.*?)(?: {2,}(.*))?$", line)):
            heading.append((entry[1], entry[2] or ""))
        elif heading and (more := re.match(r" {10,}(\S.*)$", line)):
            heading[-1] = (heading[-1][0], f"{heading[-1][1]} {more[1]}".strip())
    return found


def options_of(text):
    """The options that a --help lists, by every spelling."""
    names = " ".join(entry.split()[0] for entries in sections(text).values() for entry, _ in entries)
    return set(re.findall(r"(?<![\w-])-[\w-]+", names))


def row(entry, meaning):
    """A row of a table of options: name and kind of value, meaning, range and default."""
    found = ENTRY.match(entry)
    name = found["name"].replace(",", ", ") + (f" {found['type']}" if found["type"] and found["name"][0] == "-" else "")
    name = name.replace("|", r"\|")  # between values; a table's cell ends at a bare one
    facts = [inline(meaning, {})]
    if found["limit"]:
        facts.append(found["limit"].replace(" - ", " to "))
    if found["default"]:
        facts.append(f"Default `{found['default']}`")
    return f"| `{name}` | {'. '.join(facts)} |"


def cli_page(helps):
    lines = [
        "# Command line options",
        "",
        "Every verb of `nvfp4-moe` with every option, as `nvfp4-moe VERB --help` prints them.",
        "",
    ]
    lines += ["[The command line](cli.md) has what each verb prints, the exit codes and the JSON.", ""]
    lines += ["| verb | |", "|---|---|"]
    lines += [f"| [`{verb}`](#{verb}) | {inline(what, {})} |" for verb, what in sections(helps[""])["Subcommands"]] + [
        ""
    ]
    for verb, text in helps.items():
        if not verb:
            continue
        what, usage = text.splitlines()[0], re.search(r"^Usage: (.*)$", text, re.MULTILINE)[1]
        lines += [f"## `{verb}` {{ #{verb} }}", "", inline(what, {}) + ".", "", fence(usage, "text")]
        for heading, entries in sections(text).items():
            lines += [f"| {heading} | |", "|---|---|", *(row(*entry) for entry in entries), ""]
    return "\n".join(lines)
