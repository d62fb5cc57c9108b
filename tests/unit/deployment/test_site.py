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
