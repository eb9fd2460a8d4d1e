"""The reference page of the Python package, from its docstrings and signatures and the compiled module's stub."""

import ast
import inspect
import re

from prose import call, fence, inline
from python_api import is_dataclass

# Modules that users import separately; the page has their docstrings.
MODULES = ("nvfp4_moe.transformers", "nvfp4_moe.torch_op", "nvfp4_moe.engines", "nvfp4_moe.verify", "nvfp4_moe.bench")
HEADINGS = {"Args": "Arguments", "Attributes": "Fields"}


def dedented(lines):
    return inspect.cleandoc("\n" + "\n".join(lines)).splitlines()


def items(lines, links):
    """Entries "name: text" as a list. An indented line continues its entry, or begins one of the list below it if it
    begins with a quoted value."""
    out = []
    for line in dedented(lines):
        text = line.strip()
        named = re.match(r"([*\w][\w.*]*(?:, [*\w][\w.*]*)*)(?=(?: \(.*?\))?: )", line)
        if named:
            names = [f"[`{name}`]({links[name]})" if name in links else f"`{name}`" for name in named[1].split(", ")]
            out.append([f"- {', '.join(names)}", text[named.end() :]])
        elif out and re.match(r'"\w*"(, "\w*")*:', text):
            out.append(["    - ", text])
        elif out:
            out[-1][1] += " " + text
        else:
            out.append(["", text])
    return [begin + inline(text, links) for begin, text in out]


def docstring(node, links):
    """A definition's docstring, or a text, as Markdown: Google's sections, paragraphs, indented text as it is."""
    out = []
    text = node if isinstance(node, str) else ast.get_docstring(node) or ""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.splitlines() or [""]
        if section := re.fullmatch(r"([A-Z]\w+):", lines[0]):
            out += [f"**{HEADINGS.get(section[1], section[1])}**", "", *items(lines[1:], links), ""]
        elif lines[0].startswith("    "):
            out += [fence("\n".join(dedented(lines)), "text")]
        else:
            out += [inline(paragraph, links), ""]
    return out


def signature(name, function):
    """A function as it is declared, without self and cls; a property as a field."""
    returns = f"{ast.unparse(function.returns)}" if function.returns else "None"
    if any(ast.unparse(decorator) == "property" for decorator in function.decorator_list):
        return f"{name}: {returns}"
    arguments = re.split(r", (?=\*|\w+: |\w+$)", ast.unparse(function.args))
    arguments = [re.sub(r"(: [^=]*)=", r"\1 = ", one) for one in arguments]
    return call(name, [one for one in arguments if one not in ("", "self", "cls")], f" -> {returns}")


def is_public(name, node):
    return isinstance(node, ast.FunctionDef) and not name.startswith("_") and not name.endswith("_json")


def class_lines(api, module, name, node, links):
    members, _ = api.members(module, node)
    init = members.get("__init__", (None, None))[1]
    lines = docstring(node, links)
    if is_dataclass(node):
        fields = [ast.unparse(one) for _, one in members.values() if isinstance(one, ast.AnnAssign)]
        lines = [fence(call(name, fields, ""), "python"), *lines]
    elif init is not None and "opened:" not in ast.unparse(init.args):  # made by the caller, not by a class method
        lines = [fence(signature(name, init).rpartition(" -> ")[0], "python"), *lines, *docstring(init, links)]
    for member, (_, one) in members.items():
        if is_public(member, one):
            lines += [f"### `{name}.{member}` {{ #{name}.{member} }}", "", fence(signature(member, one), "python")]
            lines += docstring(one, links)
    return lines


def python_page(api):
    definitions = {name: api.named("nvfp4_moe", name) for name in api.public("nvfp4_moe")}
    links, errors = {}, []
    for name, (module, node) in definitions.items():
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            continue
        members = api.members(module, node)[0] if isinstance(node, ast.ClassDef) else {}
        links[name] = links[f"nvfp4_moe.{name}"] = "#errors" if "finding" in members else f"#{name}"
        links |= {f"{name}.{one}": f"#{name}.{one}" for one, (_, what) in members.items() if is_public(one, what)}
    lines = ["# Python package", "", *docstring(api.text("nvfp4_moe"), links)]
    for name, (module, node) in definitions.items():
        if links.get(name) == "#errors":
            bases = ", ".join(f"`{ast.unparse(base)}`" for base in node.bases)
            errors.append(f"| `{name}` | {bases} | {inline(ast.get_docstring(node), {})} |")
        elif isinstance(node, ast.ClassDef):
            lines += [f"## `{name}` {{ #{name} }}", "", *class_lines(api, module, name, node, links)]
        elif isinstance(node, ast.FunctionDef):
            lines += [f"## `{name}` {{ #{name} }}", "", fence(signature(name, node), "python"), *docstring(node, links)]
    lines += ["## Errors", "", "| class | is a | meaning |", "|---|---|---|", *errors, ""]
    for module in MODULES:
        lines += [f"## `{module}` {{ #{module} }}", "", *docstring(api.text(module), links)]
    return "\n".join(lines)
