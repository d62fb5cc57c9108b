"""A real Chromium for the pages of the console. Where none is there its tests are skipped with that reason, but for
`--require-browser`, which `make test-browser` gives: then they fail.
"""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright
from sqlalchemy import Engine

from tests.chromium import ARGUMENTS, NO_BROWSER, find_chromium
from tests.services import connected_engine, migrated_database, running_postgres


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-browser", action="store_true", help="without a Chromium, fail instead of skipping"
    )


@pytest.fixture(scope="module")
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        if request.config.getoption("--require-browser", default=False):
            pytest.fail(NO_BROWSER)
        pytest.skip(NO_BROWSER)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One database for all: each page is looked at with what is there."""
    with running_postgres() as postgres, migrated_database(postgres) as url, connected_engine(url) as engine:
        yield engine
