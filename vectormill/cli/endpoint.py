"""Find the service that a command uses: its API, its Postgres and its Redis."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, get_args

from vectormill.cli.printing import tell
from vectormill.client import Client
from vectormill.domain.errors import ConfigurationError, Unavailable
from vectormill.embedded.data_dir import LOCK_NAME, RunningStack, find_running, read_holder
from vectormill.settings import Server, Settings, load_settings

# The longest time that `vectormill up` may take to start: the first start creates a Postgres cluster and loads a model,
# and crash recovery may replay a large log.
START_SECONDS: Final = 300.0
POLL_SECONDS: Final = 0.1


def find_service(
    *needed: str, data_dir: Path | None = None, needs_api: bool = True, **overrides: Any
) -> Settings:
    """Return the settings with the addresses of the service that a command uses; None for what there is not.

    `data_dir` and `overrides` are the command's own options. The stack on a directory that the command names comes
    first, then the settings, then the stack on the settings' directory, unless they name servers that it has not. If
    the settings lack what is `needed`, a stack that is starting is waited for, as by `await_stack`.
    """
    settings = load_settings(data_dir=data_dir, **overrides)
    if data_dir is None and needed and all(getattr(settings, name) for name in needed):
        return settings
    directory = settings.data_dir.expanduser()
    stack = await_stack(directory, needs_api=needs_api) if needed else find_running(directory)
    # In place of a named directory not even the API that the environment names is asked.
    found: dict[str, str | None] = {
        "api_url": settings.api_url if data_dir is None else overrides.get("api_url")
    }
    if stack is not None:
        found["api_url"] = found["api_url"] or stack.api_url
        if found["api_url"] == stack.api_url:
            found["api_key"] = settings.api_key or stack.api_key
        servers = {name: getattr(stack, name) for name in get_args(Server)}
        if data_dir is not None or all(
            getattr(settings, name) in (None, url) for name, url in servers.items()
        ):
            found |= servers
    return settings.model_copy(update=found)


def await_stack(
    data_dir: Path, seconds: float = START_SECONDS, *, needs_api: bool = True
) -> RunningStack | None:
    """Return the stack that runs on this data directory; None if none runs.

    Wait while it is starting, until its API is ready, or only until its servers run. Raise Unavailable if that takes
    more than `seconds`.
    """
    deadline = time.monotonic() + seconds
    is_told = False
    while ((stack := find_running(data_dir)) is None or (needs_api and stack.api_url is None)) and (
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
    return stack


@contextmanager
def connected(api_url: str | None, data_dir: Path | None = None) -> Iterator[Client]:
    """Yield a client of the API that a command uses, by default the API of `vectormill up`.

    Raise Unavailable if a data directory was given and no stack runs there.
    """
    settings = find_service("api_url", api_url=api_url, data_dir=data_dir)
    url = settings.api_url
    if url is None:
        if data_dir is not None:
            raise Unavailable(
                f"No stack is running on {data_dir}: start one with `vectormill up --data-dir {data_dir}`, or name a "
                "service with --api-url."
            )
        url = f"http://127.0.0.1:{settings.api_port}"
    with Client(url, api_key=settings.api_key) as client:
        yield client


@contextmanager
def find_database(data_dir: Path | None, *, is_migrated: bool, has_data: bool = False) -> Iterator[Settings]:
    """Yield settings with the service's Postgres, or that of the data directory, which is started if it does not run.

    A Postgres that is started here is migrated before, if that is asked for. Raise ConfigurationError if it would be
    a new one, but `has_data` says that the command needs what a service has written.
    """
    settings = find_service("database_url", data_dir=data_dir, needs_api=False)
    if settings.database_url is not None:
        yield settings
        return
    from vectormill.db.migrations import migrate
    from vectormill.embedded.postgres import has_cluster
    from vectormill.embedded.stack import EmbeddedStack

    directory = settings.data_dir.expanduser()
    if not has_cluster(directory):
        hint = "name that of your service by --data-dir, as for its `vectormill up`, or set VECTORMILL_DATABASE_URL"
        if has_data:
            raise ConfigurationError(f"There is no database in {directory}: {hint}.")
        if is_migrated:
            tell(f"Making a new database in {directory}. If that is not your service's, {hint}.")
    with EmbeddedStack(directory, redis_url="redis://") as stack:  # these commands need no Redis
        settings = settings.model_copy(update=stack.urls)
        if is_migrated:
            migrate(settings)
        yield settings
