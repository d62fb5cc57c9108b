"""Commands that write the whole database to a file, and fill an empty database from it."""

import time
from pathlib import Path

import typer

from vectormill.cli.command import command
from vectormill.cli.jobs import name_output
from vectormill.cli.printing import tell
from vectormill.files.outputs import check_outputs

app = typer.Typer()


@command(
    app,
    "vectormill backup vectormill.dump",
    "VECTORMILL_DATABASE_URL=postgresql://… vectormill backup /backups/$(date +%F).dump",
    note="Everything durable is in Postgres; only results in object storage and models are not in the file. "
    "It is a dump of pg_dump in its custom format.",
)
def backup(output: Path, *, data_dir: Path | None = None) -> None:
    """Write the whole database to a file, as of this moment, while all processes continue.

    The file appears whole or not at all.

    Args:
        output (FILE): The file to write, or - for stdout; an existing one is replaced once the new one is complete.
    """
    from vectormill.cli.endpoint import find_database
    from vectormill.db.backup import dump
    from vectormill.embedded.binaries import find_client

    began = time.monotonic()
    path = name_output(output)
    check_outputs([path])
    with find_database(data_dir, is_migrated=False, has_data=True) as settings:
        num_bytes = dump(find_client("pg_dump"), settings, path)
    tell(f"Wrote {num_bytes:,} bytes to {path} in {time.monotonic() - began:,.0f} s.")


@command(
    app,
    "vectormill restore vectormill.dump --data-dir ./restored",
    "VECTORMILL_DATABASE_URL=postgresql://…/new vectormill restore vectormill.dump",
    note="The database must be empty: for an embedded one, name a new directory. It is restored in one transaction, "
    "indexes are built again, and the schema is migrated to this release.",
)
def restore(input: Path, *, data_dir: Path | None = None) -> None:
    """Fill an empty database from a file of `vectormill backup`, all of it or nothing.

    Open jobs continue when the processes are started again. What was committed after the backup is encoded again.

    Args:
        input (FILE): The file that `vectormill backup` or pg_dump --format=custom wrote.
    """
    from vectormill.cli.endpoint import find_database
    from vectormill.db import backup as backups
    from vectormill.domain.errors import ConfigurationError
    from vectormill.embedded.binaries import find_client

    if not input.is_file():
        raise ConfigurationError(f"There is no file {input}.")
    began = time.monotonic()
    with find_database(data_dir, is_migrated=False) as settings:
        counts = backups.restore(find_client("pg_restore"), settings, input)
    told = ", ".join(f"{number:,} {name}" for name, number in counts.items())
    tell(f"Restored {told} in {time.monotonic() - began:,.0f} s.")
