"""The database of a command that needs Postgres and no API."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vectormill.settings import Settings


@contextmanager
def find_database(settings: "Settings", *, is_migrated: bool, has_data: bool = False) -> Iterator[str]:
    """Yield the URL of the settings' database, or of the data directory's, whose Postgres is started if necessary.

    A Postgres that is started here is migrated before, if that is asked for. Raise ConfigurationError if it would be
    a new one, but `has_data` says that the command needs what a service has written.
    """
    from vectormill.cli.printing import tell
    from vectormill.db.migrations import upgrade
    from vectormill.domain.errors import ConfigurationError
    from vectormill.embedded.cluster import has_cluster
    from vectormill.embedded.data_dir import find_running
    from vectormill.embedded.stack import EmbeddedStack

    directory = settings.data_dir.expanduser()
    running = find_running(directory)
    if settings.database_url is not None:
        yield settings.database_url
    elif running is not None:
        yield running.database_url
    else:
        if not has_cluster(directory):
            hint = "name that of your service by --data-dir, as for its `vectormill up`, or set VECTORMILL_DATABASE_URL"
            if has_data:
                raise ConfigurationError(f"There is no database in {directory}: {hint}.")
            if is_migrated:
                tell(f"Making a new database in {directory}. If that is not your service's, {hint}.")
        with EmbeddedStack(directory, redis_url="redis://") as stack:  # these commands need no Redis
            if is_migrated:
                upgrade(stack.database_url)
            yield stack.database_url
