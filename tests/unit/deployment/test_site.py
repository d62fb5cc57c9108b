"""The documentation site can be built, and asks no other host; mkdocs itself checks navigation, links and anchors."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

# Addresses of other hosts that a browser fetches by itself; a link is only followed by a person.
FETCHED_FROM_ELSEWHERE = re.compile(
    r"""<(?:script|img|iframe|source|link(?![^>]*canonical))\b[^>]*\b(?:src|href|srcset)=["']?(?:https?:)?//[^>]*"""
)


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
    pages = [path.read_text(encoding="utf-8") for path in site.rglob("*.html")]
    assert "<script src=" in pages[0]
    assert [found for page in pages for found in FETCHED_FROM_ELSEWHERE.findall(page)] == []
