"""Hooks of MkDocs: add the version, the generated reference pages, and the files outside docs/ that pages link to.

Links in a page are those of the repository, so that they work there too. In the site they lead to the site's copy: a
page for a Markdown file, else the file itself. A folder is only named.
"""

import os
import pathlib
import re
import sys

from mkdocs.structure.files import File, InclusionLevel

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tools/docs"), str(ROOT / "tools/check")]

from c_reference import c_page, cpp_page  # noqa: E402
from check_docs import HISTORY, LINK  # noqa: E402
from cli_reference import cli_page, help_of  # noqa: E402
from python_api import Api  # noqa: E402
from python_reference import python_page  # noqa: E402

BUILT = ROOT / "build/cpu"


def uri_of(path):
    """The source path in the site of a file of the repository; its front page is the site's."""
    return path.removeprefix("docs/")


def target_of(page, link):
    """The file in the repository that a relative link means, or None for other links."""
    if not link or re.match(r"[a-z]+:", link):
        return None
    return os.path.normpath(os.path.join(os.path.dirname(page), link))


def generated():
    c_header, cpp_header = ((ROOT / f"include/nvfp4_moe/nvfp4_moe.{end}").read_text() for end in ("h", "hpp"))
    yield "reference/c-api.md", c_page(c_header)
    yield "reference/cpp-api.md", cpp_page(cpp_header)
    yield "reference/python-api.md", python_page(Api(BUILT / "python/nvfp4_moe/_core.pyi"))
    yield "reference/cli-options.md", cli_page(help_of(str(BUILT / "cli/nvfp4-moe")))


def on_config(config):
    """Writes the version at the foot of each page."""
    version = re.search(r"project\(nvfp4_moe VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
    config.copyright = f"{config.site_name} {version}, {config.copyright}"
    return config


def on_files(files, config):
    for uri, content in generated():
        files.append(File.generated(config, uri, content=content))
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages() if file.abs_src_path]
    pages += ["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
    seen = set(pages)
    for path in pages:
        if not path.startswith("docs/"):
            inclusion = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path), inclusion=inclusion))
        if not path.endswith(".md"):
            continue
        for _, link, _ in LINK.findall((ROOT / path).read_text()):
            target = target_of(path, link)
            if target and target not in seen and target != "README.md" and (ROOT / target).is_file():
                seen.add(target)
                if not target.startswith("docs/"):
                    pages.append(target)
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    path = f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri
    if not (ROOT / path).exists():
        return markdown

    if path.startswith(HISTORY):
        page.meta["search"] = {"exclude": True}

    def turn(match):
        text, link, anchor = match.groups()
        target = target_of(path, link)
        if target is None or not (ROOT / target).exists():
            return match[0]
        if (ROOT / target).is_dir():
            return f"`{target}`"
        if text == os.path.basename(link) and text.endswith(
            ".md"
        ):  # the page's title reads better than its file's name
            text = re.search(r"^# ([^:\n]+)", (ROOT / target).read_text(), re.MULTILINE)[1]
        return f"[{text}]({os.path.relpath(uri_of(target), os.path.dirname(uri) or '.')}{anchor or ''})"

    return LINK.sub(turn, markdown)
