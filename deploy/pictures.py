"""Take the screenshots of the console: `python -m deploy.pictures` starts a stack and gives it real work.

Needs a Chromium (`chromium` in PATH, or the program that CHROMIUM names). The texts are docstrings of
Python's standard library, encoded by the packaged model.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import httpx
from playwright.sync_api import Page, ViewportSize, sync_playwright

from tests.chromium import ARGUMENTS, NO_BROWSER, find_chromium
from tests.clusters import new_directory
from vectormill.corpus import Docstring, read_docstrings, split_first_sentence, take_evenly

PICTURES: Final = Path(__file__).parent.parent / "docs" / "pictures"
WINDOW: Final[ViewportSize] = {"width": 1180, "height": 740}
TALL_WINDOW: Final[ViewportSize] = {"width": 1180, "height": 1010}
START_SECONDS: Final = 300.0
WORK_SECONDS: Final = 900.0
# The share of the job that is done when its picture is taken, so that its chart shows a line.
SHOWN_SHARE: Final = 0.4


@contextmanager
def running_stack(chunk_max_items: int) -> Iterator[httpx.Client]:
    """Start a `vectormill up` for the duration of the block, and yield a client of it."""
    port, flower_port = find_ports(2)
    with new_directory() as home:
        command = [sys.executable, "-m", "vectormill.cli", "up", "--data-dir", str(home)]
        command += ["--api-port", str(port), "--flower-port", str(flower_port)]
        own = {"VECTORMILL_CHUNK_MAX_ITEMS": str(chunk_max_items), "VECTORMILL_WORKER_DEVICES": "cpu:0,cpu:1"}
        environment = {**os.environ, **own}
        stack = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
                wait_for_worker(client, stack)
                yield client
        finally:
            stack.terminate()
            stack.wait()


def find_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_for_worker(client: httpx.Client, stack: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and stack.poll() is None:
        try:
            workers = client.get("/v1/workers").json()["data"]
        except (httpx.TransportError, KeyError):
            workers = []
        if any(worker["report"].get("state", "running") == "running" for worker in workers):
            return
        time.sleep(1)  # the stack is another process, so poll
    sys.exit("The stack did not start; run `vectormill up` to see why.")


def submit(client: httpx.Client, items: Iterable[tuple[str, str]], **parameters: Any) -> str:
    lines = b"".join(json.dumps({"key": key, "text": text}).encode() + b"\n" for key, text in items)
    answer = client.post(
        "/v1/jobs", params=parameters, content=lines, headers={"Content-Type": "application/x-ndjson"}
    )
    answer.raise_for_status()
    return str(answer.json()["id"])


def find_share(client: httpx.Client, job_id: str) -> float:
    job = client.get(f"/v1/jobs/{job_id}").json()
    return float((job["num_done"] + job["num_failed"]) / job["num_items"])


def wait_for_share(client: httpx.Client, job_ids: Sequence[str], share: float) -> None:
    until = time.monotonic() + WORK_SECONDS
    while any(find_share(client, job_id) < share for job_id in job_ids):
        if time.monotonic() > until:
            sys.exit(f"The jobs did not reach {share:.0%} in {WORK_SECONDS:g} s.")
        time.sleep(1)  # the stack is another process, so poll


def submit_work(client: httpx.Client, docstrings: Sequence[Docstring]) -> str:
    """Submit jobs that end up in most of the possible states. Return the id of the job to show at work."""
    pairs = [(docstring.key, docstring.text) for docstring in docstrings]
    count = len(pairs)
    titles = [(key, split_first_sentence(text)[0] or text) for key, text in take_evenly(pairs, count // 10)]
    ended = [
        submit(client, titles, collection="titles"),
        submit(client, take_evenly(pairs, count // 14), collection="tickets", long_texts="fail"),
    ]
    wait_for_share(client, ended, 1.0)
    later = submit(client, take_evenly(pairs, count // 3), collection="archive", priority=9)
    client.post(f"/v1/jobs/{later}/pause").raise_for_status()
    unwanted = submit(client, take_evenly(pairs, count // 17), collection="drafts")
    client.post(f"/v1/jobs/{unwanted}/cancel").raise_for_status()
    shown = submit(client, pairs, collection="stdlib")
    submit(
        client, take_evenly(pairs, count // 4), collection="nightly", priority=8, metadata='{"source":"cron"}'
    )
    return shown


def take_pictures(page: Page, name: str) -> None:
    """Take a picture of a page in light and then in dark colours, which shows the same moment within a second."""
    schemes: tuple[tuple[Literal["light", "dark"], str], ...] = (("light", ""), ("dark", "-dark"))
    for scheme, suffix in schemes:
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.screenshot(path=PICTURES / f"{name}{suffix}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the screenshots of the console.")
    parser.add_argument("--texts", type=int, default=8000, help="use fewer on a slow machine")
    wanted = parser.parse_args()
    path = find_chromium()
    if path is None:
        sys.exit(NO_BROWSER)
    PICTURES.mkdir(exist_ok=True)
    with running_stack(max(wanted.texts // 40, 8)) as client, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        client.post("/v1/collections", json={"name": "stdlib", "keep_text": True}).raise_for_status()
        shown = submit_work(client, take_evenly(list(read_docstrings()), wanted.texts))
        pages = {}
        for name, path, window in (
            ("console-jobs", "/console/jobs", WINDOW),
            ("console-job", f"/console/jobs/{shown}", TALL_WINDOW),
            ("console-workers", "/console/workers", TALL_WINDOW),
        ):
            pages[name] = browser.new_context(viewport=window).new_page()
            pages[name].goto(f"{client.base_url}{path}")  # it updates itself, as for a visitor
        wait_for_share(client, [shown], SHOWN_SHARE)
        for name, page in pages.items():
            page.wait_for_timeout(1500)  # until the page has received the latest event
            take_pictures(page, name)
        wait_for_share(client, [shown], 1.0)
        page = browser.new_context(viewport=TALL_WINDOW).new_page()
        page.goto(f"{client.base_url}/console/collections/stdlib/search?q=read+a+file+from+a+zip+archive")
        take_pictures(page, "console-search")
        browser.close()


if __name__ == "__main__":
    main()
