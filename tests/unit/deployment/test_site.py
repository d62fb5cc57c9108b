"""The documentation site: all of docs/ is in it, every link and anchor leads somewhere, and it asks no other host."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.site.notebook import render_notebook
from deploy.site.routes import name_type, plain
from tests.architecture.sources import DOCS, ROOT

pytestmark = pytest.mark.tail

# What a browser fetches by itself; a link is only followed by a person.
FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, in which a Python function is named."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def find_pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from find_pages(part)


def test_every_page_of_the_docs_has_its_place_in_the_navigation() -> None:
    nav = list(find_pages(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]))
    assert len(nav) == len(set(nav))
    there = {path.with_suffix(".md").name for path in (*DOCS.glob("*.md"), *DOCS.glob("*.ipynb"))}
    assert there <= set(nav)


class Fetches(HTMLParser):
    """Addresses that a page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in FETCHED and given.get("rel") != "canonical":
            self.found.append(given.get(FETCHED[tag]) or given.get("srcset") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built so that a warning is an error: of links, anchors, and pages that no one would find."""
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(target)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return target


def test_the_site_is_built_without_a_warning_and_has_what_is_made_of_the_code(site: Path) -> None:
    for page, words in {
        "index.html": "Text in, vectors out, in bulk",
        "reference/cli.html": "vectormill collections create",
        "reference/http.html": "POST /v1/jobs",
        "reference/client.html": "wait",
        "benchmarks.html": "The main job",
        "decisions/0036-a-wheel-that-migrates.html": "vectormill.migrations",
    }.items():
        assert words in (site / page).read_text(encoding="utf-8"), page


def test_no_page_fetches_anything_from_another_host(site: Path) -> None:
    for path in site.rglob("*.html"):
        fetches = Fetches()
        fetches.feed(path.read_text(encoding="utf-8"))
        assert fetches.found
        foreign = [address for address in fetches.found if re.match(r"(https?:)?//", address)]
        assert not foreign, path.name


def test_every_picture_of_a_page_is_there(site: Path) -> None:
    for path in site.glob("*.html"):
        fetches = Fetches()
        fetches.feed(path.read_text(encoding="utf-8"))
        # The page of what is not found names its own from the root, as it may stand for any.
        pictures = [name for name in fetches.found if name.endswith((".png", ".svg")) and name[0] != "/"]
        assert [name for name in pictures if not (path.parent / name).exists()] == [], path.name


def test_links_of_the_readme_lead_to_pages_of_the_site(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="COLLECTIONS.html"' in text
    assert 'href="benchmarks.html"' in text
    assert 'href="docs/' not in text


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"$ref": "#/components/schemas/Job"}, "`Job`"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "integer or null"),
        ({"enum": ["a", "b"]}, "`a`, `b`"),
        ({}, "any"),
    ],
)
def test_a_type_is_told_as_people_say_it(schema: dict[str, Any], told: str) -> None:
    assert name_type(schema) == told


def test_a_cell_of_a_table_holds_no_line_end_and_no_bar() -> None:
    assert plain("one | two\n  three <b>") == "one \\| two three &lt;b>"


def test_a_notebook_becomes_a_page_with_what_its_code_gave(tmp_path: Path) -> None:
    notebook = tmp_path / "tour.ipynb"
    notebook.write_text(
        '{"cells": [{"cell_type": "markdown", "source": ["# Tour\\n", "Look."]},'
        '{"cell_type": "code", "source": ["1 + 1"], "outputs": [{"data": {"text/plain": ["2"]}}]}]}',
        encoding="utf-8",
    )
    assert render_notebook(notebook) == "# Tour\nLook.\n\n```python\n1 + 1\n```\n\n```text\n2\n```"
