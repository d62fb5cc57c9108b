"""The database of a command that needs Postgres and no API."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vectormill.settings import Settings


@contextmanager
def find_database(settings: "Settings", *, is_migrated: bool) -> Iterator[str]:
    """Yield the URL of the settings' database, or of the data directory's, whose Postgres is started if necessary.

    A Postgres that is started here is migrated before, if that is asked for.
    """
    from vectormill.db.migrations import upgrade
    from vectormill.embedded.data_dir import find_running
    from vectormill.embedded.stack import EmbeddedStack

    directory = settings.data_dir.expanduser()
    running = find_running(directory)
    if settings.database_url is not None:
        yield settings.database_url
    elif running is not None:
        yield running.database_url
    else:
        with EmbeddedStack(directory, redis_url="redis://") as stack:  # these commands need no Redis
            if is_migrated:
                upgrade(stack.database_url)
            yield stack.database_url
