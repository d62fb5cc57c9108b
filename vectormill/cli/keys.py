"""Commands that create, list and revoke API keys.

They access Postgres directly, because the API requires a key.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from vectormill.cli.command import command
from vectormill.cli.printing import listing, tell

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from vectormill.settings import Settings

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: vectormill keys create laptop --scope write --expires 90d",
    help="Create, list and revoke API keys.",
)


@command(app, "VECTORMILL_API_KEY=$(vectormill keys create laptop --expires 90d)")
def create(
    name: str,
    *,
    scope: Literal["read", "write", "sources", "webhooks", "admin"] = "write",
    expires: str | None = None,
    from_environment: bool = False,
    data_dir: Path | None = None,
) -> None:
    """Create a key and print it. It is shown only this once: only its hash is stored.

    Args:
        name (NAME): A name for the key, such as its owner's.
        scope: read: look and search. write: also submit and stop jobs. sources: also have the server read files and
            databases. webhooks: also have it post to URLs. admin: everything.
        expires (TIME): When the key expires, such as 12h, 90d or 2w from now.  [default: never]
        from_environment: Store the key in VECTORMILL_API_KEY unless it is stored already. It replaces another key of
            this name, which is revoked.
    """
    from vectormill.domain.errors import ConfigurationError
    from vectormill.keys.api_key import check_key_name, check_secret, make_secret, parse_lifetime
    from vectormill.keys.api_keys import create_key, keep_key

    check_key_name(name)
    lifetime = parse_lifetime(expires)
    with connected(data_dir) as (engine, settings), engine.begin() as connection:
        if from_environment:
            if settings.api_key is None:
                raise ConfigurationError("VECTORMILL_API_KEY is not set.")
            tell(keep_key(connection, name, check_secret(settings.api_key), scope, lifetime))
            return
        secret = make_secret()
        create_key(connection, name, secret, scope, lifetime)
    tell(
        f"The key {name} ({scope}), shown this once. Set VECTORMILL_API_KEY to it, or send it as "
        "`Authorization: Bearer …`. From now on the API requires a key."
    )
    typer.echo(secret)


@command(
    app,
    "vectormill keys list",
    name="list",
    view=listing("name", "scope", "state", "created_at", "expires_at", "last_used_at"),
)
def list_all(*, data_dir: Path | None = None) -> list[dict[str, Any]]:
    """List the keys, without their secrets."""
    from vectormill.keys.api_keys import list_keys

    with connected(data_dir) as (engine, _), engine.connect() as connection:
        found = list_keys(connection)
    now = datetime.now(UTC)
    return [
        {
            "name": key.name,
            "scope": key.scope,
            "state": key.describe_state(now),
            "created_at": key.created_at.isoformat(timespec="seconds"),
            "expires_at": key.expires_at and key.expires_at.isoformat(timespec="seconds"),
            "last_used_at": key.last_used_at and key.last_used_at.isoformat(timespec="minutes"),
        }
        for key in found
    ]


@command(app, "vectormill keys revoke laptop")
def revoke(name: str, *, data_dir: Path | None = None) -> None:
    """Revoke a key for good; every API process refuses it within seconds.

    Args:
        name (NAME): A name for the key, such as its owner's.
    """
    from vectormill.keys.api_keys import load_keys, revoke_key

    with connected(data_dir) as (engine, _), engine.begin() as connection:
        revoke_key(connection, name)
        is_last = not load_keys(connection)
    typer.echo(f"The key {name} is revoked; every API process refuses it within seconds.")
    if is_last:
        typer.echo(
            "It was the last key: an API on loopback now requires none, and one that others can reach refuses everyone."
        )


@contextmanager
def connected(data_dir: Path | None) -> "Iterator[tuple[Engine, Settings]]":
    """Yield the database of the settings or of the data directory, whose Postgres is started if necessary.

    Raise ConfigurationError if the database was never migrated.
    """
    from psycopg.errors import UndefinedTable
    from sqlalchemy.exc import ProgrammingError

    from vectormill.cli.endpoint import find_database
    from vectormill.db.session import make_engine
    from vectormill.domain.errors import ConfigurationError

    # `vectormill up` on a public address needs a key before its first start, which migrates its database.
    with find_database(data_dir, is_migrated=True) as settings:
        engine = make_engine(settings.need("database_url"), application_name="vectormill keys", pool_size=1)
        try:
            yield engine, settings
        except ProgrammingError as error:
            if not isinstance(error.orig, UndefinedTable) or "api_keys" not in str(error.orig):
                raise
            raise ConfigurationError(
                "The database has no table of API keys: run `vectormill migrate` first."
            ) from error
        finally:
            engine.dispose()
