"""Hooks of MkDocs that add pages from outside docs/ and adapt links.

README, changelog and benchmarks are pages of the site although they are outside docs/. Three references are
generated from the code at each build, so that they are never out of date.
"""

import re
import sys
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # mkdocs loads a hook as a file and not as a module of a package

from deploy.site.commands import describe_commands  # noqa: E402 - needs the path set above
from deploy.site.notebook import render_notebook  # noqa: E402
from deploy.site.routes import describe_routes  # noqa: E402

# Files of the repository outside docs/, and their pages on the site.
OUTSIDE: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
CLIENT: Final = """# Python client

Generated from the docstrings. For a guide, see [the client](../CLIENT.md).

::: vectormill.client.Client

::: vectormill.client.AsyncClient
"""
LINK: Final = re.compile(r"(?P<open>!?\[[^\]\n]*\]\()(?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")
# The source of an HTML image; pages use HTML for pictures that exist in a light and a dark version.
ATTRIBUTE: Final = re.compile(r'(?<=<)(?P<tag>img|source)(?P<rest>[^>]*? (?:src|srcset)=")docs/')
FENCE: Final = re.compile(r"^\s*(```|~~~)")
ITEM: Final = re.compile(r"^([-*]|\d+\.) ")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add all decision records to the navigation."""
    assert config.nav is not None
    decisions = sorted(f"decisions/{path.name}" for path in (ROOT / "docs/decisions").glob("[0-9]*.md"))
    for section in config.nav:
        for pages in section.values():
            for page in pages:
                if isinstance(page, dict) and "Decisions" in page:
                    page["Decisions"] += decisions
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages from outside docs/, notebooks, and generated references."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for notebook in sorted((ROOT / "docs").glob("*.ipynb")):
        page = notebook.with_suffix(".md").name
        files.append(File.generated(config, page, content=render_notebook(notebook)))
    made = {
        "reference/cli.md": describe_commands(),
        "reference/http.md": describe_routes(),
        "reference/client.md": CLIENT,
    }
    for page, content in made.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with its links adapted to the site."""
    source = find_source(page.file.src_uri)
    text = LINK.sub(lambda link: rewrite_link(link, source, page.file.src_uri), markdown)
    if page.file.src_uri in OUTSIDE.values():
        text = ATTRIBUTE.sub(r"\g<tag>\g<rest>", text)
    return separate_lists(text)


def find_source(page: str) -> Path:
    """Return the repository file from which a page is made."""
    return next((ROOT / name for name, made in OUTSIDE.items() if made == page), ROOT / "docs" / page)


def rewrite_link(link: re.Match[str], source: Path, page: str) -> str:
    """Return a repository link as a link of the site.

    A link to a file that is not on the site is replaced by the file's name.
    """
    target = (source.parent / link["target"]).resolve()
    if not target.is_relative_to(ROOT) or not target.exists():
        return link[0]
    name = target.relative_to(ROOT).as_posix()
    if name.startswith("docs/") and target.is_file():
        place = re.sub(r"\.ipynb$", ".md", name.removeprefix("docs/"))
    elif name in OUTSIDE:
        place = OUTSIDE[name]
    else:
        return f"`{name}`" if not link["open"].startswith("!") else link[0]
    up = "../" * page.count("/")
    return f"{link['open']}{up}{place}{link['anchor'] or ''})"


def separate_lists(text: str) -> str:
    """Insert an empty line before each list, which MkDocs' Markdown parser needs, unlike GitHub's."""
    lines: list[str] = []
    is_code = False
    for line in text.split("\n"):
        before = lines[-1] if lines else ""
        if FENCE.match(line):
            is_code = not is_code
        elif (
            ITEM.match(line) and not is_code and before and not ITEM.match(before) and not before[0].isspace()
        ):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)
