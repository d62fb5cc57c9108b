"""Hooks of MkDocs: what the site has besides the pages of docs/, and links that are right in both places.

The README, the changelog and the benchmarks lie outside of docs/ and are pages here; three references are made of the
code at each build, so nobody can forget to write them anew.
"""

import re
import sys
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # mkdocs is a program of its own, and a hook no module of a package

from deploy.site.commands import describe_commands  # noqa: E402 - the path comes first
from deploy.site.notebook import render_notebook  # noqa: E402
from deploy.site.routes import describe_routes  # noqa: E402

# File of the repository -> page of the site.
OUTSIDE: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
CLIENT: Final = """# Python client

What is asked with it, and how: [the client](../CLIENT.md). Made of the docstrings.

::: vectormill.client.Client

::: vectormill.client.AsyncClient
"""
LINK: Final = re.compile(r"(?P<open>!?\[[^\]\n]*\]\()(?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")
# Of markup in a page, which a picture for each scheme of colors needs.
ATTRIBUTE: Final = re.compile(r'(?<=<)(?P<tag>img|source)(?P<rest>[^>]*? (?:src|srcset)=")docs/')
FENCE: Final = re.compile(r"^\s*(```|~~~)")
ITEM: Final = re.compile(r"^([-*]|\d+\.) ")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Return the navigation as it is written, with all decisions."""
    assert config.nav is not None
    decisions = sorted(f"decisions/{path.name}" for path in (ROOT / "docs/decisions").glob("[0-9]*.md"))
    for section in config.nav:
        for pages in section.values():
            for page in pages:
                if isinstance(page, dict) and "Decisions" in page:
                    page["Decisions"] += decisions
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages that lie elsewhere, and those that are made."""
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
    """Return the page with links that lead to where the site has what the repository has elsewhere."""
    source = find_source(page.file.src_uri)
    text = LINK.sub(lambda link: rewrite_link(link, source, page.file.src_uri), markdown)
    if page.file.src_uri in OUTSIDE.values():
        text = ATTRIBUTE.sub(r"\g<tag>\g<rest>", text)
    return separate_lists(text)


def find_source(page: str) -> Path:
    """Return the file of the repository that a page is made of."""
    return next((ROOT / name for name, made in OUTSIDE.items() if made == page), ROOT / "docs" / page)


def rewrite_link(link: re.Match[str], source: Path, page: str) -> str:
    """Return a link of the repository as one of the site; one to a file that the site does not have becomes its
    name.
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
    """Put an empty line before each list, which only the site's reader of Markdown needs."""
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
