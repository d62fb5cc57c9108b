"""Find the API that a command uses. Starts nothing."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from vectormill.client import Client
from vectormill.domain.errors import Unavailable
from vectormill.embedded.data_dir import LOCK_NAME, find_running, read_holder
from vectormill.settings import Settings, load_settings

# The longest time that `vectormill up` may take to start.
START_SECONDS: Final = 300.0
POLL_SECONDS: Final = 0.1


def find_api_url(settings: Settings) -> str | None:
    """Return the URL of the configured API, or of the stack on the data directory; None without either."""
    return settings.api_url or find_running_stack(settings.data_dir.expanduser())


def find_running_stack(data_dir: Path) -> str | None:
    """Return the API's URL of the `vectormill up` on this data directory; None if none runs."""
    running = find_running(data_dir)
    return running.api_url if running is not None else None


def await_api_url(api_url: str | None, data_dir: Path | None, settings: Settings) -> str | None:
    """Return the URL of the API that a command uses; None if there is none.

    Wait for a stack that is starting on the data directory; raise Unavailable if it does not become ready.
    `api_url` and `data_dir` are the command's own options. With a given directory no other stack is used, not
    even one that the environment names.
    """
    if api_url is None and data_dir is None and settings.api_url is not None:
        return settings.api_url
    return api_url or await_stack(settings.data_dir.expanduser())


def await_stack(data_dir: Path, seconds: float = START_SECONDS) -> str | None:
    """Return the API's URL of the `vectormill up` on this data directory; None if none runs.

    Wait while the stack is starting. Raise Unavailable if it is not ready within `seconds`.
    """
    deadline = time.monotonic() + seconds
    is_told = False
    while (url := find_running_stack(data_dir)) is None and (
        pid := read_holder(data_dir / LOCK_NAME)
    ) is not None:
        if time.monotonic() >= deadline:
            raise Unavailable(
                f"The stack on {data_dir} (pid {pid}) has not announced its API within {seconds:g} s: see "
                f"{data_dir / 'logs'}, or name a service with --api-url."
            )
        if not is_told:
            sys.stderr.write(f"Waiting for the stack on {data_dir} (pid {pid}) to start …\n")
            is_told = True
        time.sleep(POLL_SECONDS)  # the stack is another process, whose note has to be polled
    return url


@contextmanager
def connected(api_url: str | None, data_dir: Path | None = None) -> Iterator[Client]:
    """Yield a client of the API that a command uses, by default the API of `vectormill up`.

    Raise Unavailable if a data directory was given and no stack runs there.
    """
    settings = load_settings(api_url=api_url, data_dir=data_dir)
    url = await_api_url(api_url, data_dir, settings)
    if url is None:
        if data_dir is not None:
            raise Unavailable(
                f"No stack is running on {data_dir}: start one with `vectormill up --data-dir {data_dir}`, or name a "
                "service with --api-url."
            )
        url = f"http://127.0.0.1:{settings.api_port}"
    with Client(url, api_key=settings.api_key) as client:
        yield client
