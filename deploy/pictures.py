"""Take the screenshots of the console: `python -m deploy.pictures`.

The lists of jobs and workers and a schedule are shown at the scale of millions of rows, after an hour of work,
with a device that takes no time (`benchmarks/children/null_device.py`). A job and a search are shown as they
are: docstrings of Python's standard library, encoded by the packaged model. Needs a Chromium (`chromium` in PATH,
or the program that CHROMIUM names).
"""

import argparse
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any, Final, Literal

from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from benchmarks.children.null_device import link_tree, python_environment
from benchmarks.ours import OwnStack
from tests.chromium import ARGUMENTS, NO_BROWSER, find_chromium
from vectormill.cli.stack import workplace
from vectormill.client import Client
from vectormill.corpus import read_docstrings, take_evenly
from vectormill.files.ndjson import ItemJson

ROOT: Final = Path(__file__).parent.parent
PICTURES: Final = ROOT / "docs" / "pictures"
WINDOW: Final[ViewportSize] = {"width": 1180, "height": 740}
TALL_WINDOW: Final[ViewportSize] = {"width": 1180, "height": 1010}
WORK_SECONDS: Final = 3600.0
# The share of the job that is done when its picture is taken, so that its chart shows a line.
SHOWN_SHARE: Final = 0.4
QUERY: Final = "read a file from a zip archive"
# The shortest texts are too short to limit anything but the commits, and some are cut by the model.
WORDS: Final = (12, 40, 90, 400)
# Every so often a job is submitted during the hour, and every so many jobs each schedule runs.
PAUSE_SECONDS: Final = 20.0
JOBS_PER_RUN: Final = 20


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the screenshots of the console.")
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of the largest job (2,000,000)")
    parser.add_argument("--minutes", type=float, default=60.0, help="work so long before (60)")
    parser.add_argument("--texts", type=int, default=8000, help="texts that are searched (8,000)")
    wanted = parser.parse_args()
    path = find_chromium()
    if path is None:
        sys.exit(NO_BROWSER)
    PICTURES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        show_search(browser, wanted.texts)
        show_work(browser, wanted.rows, wanted.minutes)
        browser.close()


def show_search(browser: Browser, num_texts: int) -> None:
    """Take the pictures of a job at work and of a search, with the packaged model."""
    with running(with_null_device=False) as (client, _):
        client.create_collection("stdlib", keep_text=True)
        items: Iterator[ItemJson] = (
            {"key": docstring.key, "text": docstring.text}
            for docstring in take_evenly(list(read_docstrings()), num_texts)
        )
        job = client.submit(items, collection="stdlib")["id"]
        page = open_page(browser, client, f"/console/jobs/{job}")
        wait_for_share(client, job, SHOWN_SHARE)
        take_pictures(page, "console-job")
        client.wait(job, timeout_seconds=WORK_SECONDS)
        page = open_page(browser, client, f"/console/collections/stdlib/search?q={QUERY.replace(' ', '+')}")
        take_pictures(page, "console-search")


def show_work(browser: Browser, num_rows: int, minutes: float) -> None:
    """Work for so many minutes, and take the pictures while a job of so many rows is done in part."""
    with running(with_null_device=True) as (client, tables):
        numbers = count()
        schedules = [
            schedule_table(client, tables, name, cron, num_rows // share)
            for name, cron, share in (("articles", "30 2 * * *", 4), ("tickets", "0 3 * * *", 2))
        ]
        client.create_collection("products", index_policy="hnsw")
        client.set_index("products", m=8, ef_construction=32)
        work(client, tables, schedules, num_rows // 200, time.monotonic() + 60 * minutes, numbers)
        later = client.submit(make_items(numbers, num_rows // 20), collection="archive", priority=9)
        client.pause(later["id"])
        client.cancel(client.submit(make_items(numbers, num_rows // 50), collection="drafts")["id"])
        shown = client.submit(make_items(numbers, num_rows), collection="reviews")["id"]
        client.submit(
            make_items(numbers, num_rows // 4), collection="products", priority=8, metadata={"source": "cron"}
        )
        pages = {
            name: open_page(browser, client, path, window)
            for name, path, window in (
                ("console-jobs", "/console/jobs", WINDOW),
                ("console-workers", "/console/workers", TALL_WINDOW),
                ("console-schedule", f"/console/schedules/{schedules[0]}", WINDOW),
            )
        }
        wait_for_share(client, shown, SHOWN_SHARE)
        for name, page in pages.items():
            take_pictures(page, name)


@contextmanager
def running(*, with_null_device: bool) -> Iterator[tuple[Client, Path]]:
    """Run a stack with two workers for the duration of the block; yield a client, and the database of its tables."""
    with workplace(None) as directory:
        tables = directory / "tables.db"
        variables = {
            "VECTORMILL_WORKER_DEVICES": "cpu:0,cpu:1",
            "TABLES_URL": f"sqlite:///{tables}",
            **(python_environment(link_tree(ROOT, directory / "tree", True)) if with_null_device else {}),
        }
        with OwnStack(directory / "data", variables) as stack, Client(stack.url) as client:
            yield client, tables


def make_items(numbers: Iterator[int], num_items: int) -> Iterator[ItemJson]:
    """Yield items of docstrings, no two equal."""
    texts = [docstring.text.split() for docstring in islice(read_docstrings(), 5000)]
    for number in islice(numbers, num_items):
        words = texts[number % len(texts)][: WORDS[number % len(WORDS)]]
        yield {"key": str(number), "text": f"{number} {' '.join(words)}"}


def schedule_table(client: Client, tables: Path, name: str, cron: str, num_rows: int) -> str:
    """Make a table of so many rows, a collection that follows it, and its schedule; return the schedule's name."""
    with sqlite3.connect(tables) as connection:
        connection.execute(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, body TEXT)")
        rows = ((number, f"Row {number} of {name} was sent.") for number in range(num_rows))
        connection.executemany(f"INSERT INTO {name} VALUES (?, ?)", rows)  # noqa: S608 - a name of this file
    client.create_collection(name, index_policy="none")
    query = f"SELECT id AS key, body AS text FROM {name}"  # noqa: S608 - as above
    client.set_source(name, "sql", {"url_env": "TABLES_URL", "query": query})
    return str(client.create_schedule(name, cron)["name"])


def work(
    client: Client, tables: Path, schedules: Sequence[str], size: int, until: float, numbers: Iterator[int]
) -> None:
    """Submit jobs of up to so many items, and change and re-index the tables, until that moment."""
    collections = ("products", "reviews", "titles", "products")
    for number in count():
        if number % JOBS_PER_RUN == 0:
            for name in schedules:
                with sqlite3.connect(tables) as connection:
                    changed = f"UPDATE {name} SET body = body || '.' WHERE id % 997 = {number}"  # noqa: S608 - as above
                    connection.execute(changed)
                client.run_schedule(name)
        options: dict[str, Any] = {"long_texts": "fail"} if number % 9 == 5 else {}
        items = make_items(numbers, size // (1 + number % 5))
        client.submit(items, collection=collections[number % 4], **options)
        if time.monotonic() + PAUSE_SECONDS > until:
            return
        time.sleep(PAUSE_SECONDS)  # jobs have to be spread over the time that charts and lists show


def wait_for_share(client: Client, job_id: str, share: float) -> None:
    until = time.monotonic() + WORK_SECONDS
    while (job := client.job(job_id))["num_done"] + job["num_failed"] < share * job["num_items"]:
        if time.monotonic() > until:
            sys.exit(f"The job did not reach {share:.0%} in {WORK_SECONDS:g} s.")
        time.sleep(0.5)  # the API cannot be waited for until a share of a job is done, so poll


def open_page(browser: Browser, client: Client, path: str, window: ViewportSize = TALL_WINDOW) -> Page:
    """Open a page of the console, which updates itself as for a visitor."""
    page = browser.new_context(viewport=window).new_page()
    page.goto(f"{client.base_url}{path}")
    return page


def take_pictures(page: Page, name: str) -> None:
    """Take a picture of a page in light and then in dark colours, which shows the same moment within a second."""
    schemes: tuple[tuple[Literal["light", "dark"], str], ...] = (("light", ""), ("dark", "-dark"))
    page.wait_for_timeout(1500)  # until the page has received the latest event
    for scheme, suffix in schemes:
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.screenshot(path=PICTURES / f"{name}{suffix}.png")


if __name__ == "__main__":
    main()
