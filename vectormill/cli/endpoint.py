"""Endpoint: which API a command speaks to. Starts nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vectormill.client import Client
from vectormill.embedded.running import find_running
from vectormill.settings import Settings, load_settings


def find_api_url(settings: Settings) -> str | None:
    """The API that was named, or the one of the stack that runs on the data directory; None when neither is."""
    return settings.api_url or find_running_stack(settings.data_dir.expanduser())


def find_running_stack(data_dir: Path) -> str | None:
    """The API's URL of the `vectormill up` that runs on this data directory; None when none does."""
    running = find_running(data_dir)
    return running.api_url if running is not None else None


@contextmanager
def connected(api_url: str | None, data_dir: Path | None = None) -> Iterator[Client]:
    """A client of the API in question; when none is known, of the place where `vectormill up` would put it."""
    settings = load_settings(api_url=api_url, data_dir=data_dir)
    url = find_api_url(settings) or f"http://127.0.0.1:{settings.api_port}"
    with Client(url, api_key=settings.api_key) as client:
        yield client
