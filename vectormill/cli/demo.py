"""The command demo, which runs a whole job on the docstrings of the running Python's standard library."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer

from vectormill.cli.command import command
from vectormill.cli.demos import (
    DEMOS,
    TaskDemo,
    choose_model,
    demonstrate_outputs,
    describe_python,
    run_demo,
)
from vectormill.cli.exits import EXIT_CODES_HELP, ITEMS_FAILED, CommandFailed
from vectormill.cli.printing import tell
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import EMBED

app = typer.Typer()

# The values of --task, as a literal type; a test compares them with DEMOS.
DemoTask = Literal["embed", "score", "extract"]


@command(
    app,
    "vectormill demo --keep",
    "vectormill demo --reindex",
    "vectormill demo --outputs dense,sparse,multi_vector --model ./bge-m3",
    "vectormill demo --task score --model ./bge-reranker-base",
    "vectormill demo --task extract --model ./gliner_small-v2.1",
    note=EXIT_CODES_HELP,
)
def demo(
    *,
    task: DemoTask = EMBED,
    data_dir: Path | None = None,
    keep: bool = False,
    api_url: str | None = None,
    model: str | None = None,
    items: int | None = None,
    outputs: str | None = None,
    reindex: bool = False,
    json: bool = False,
) -> None:
    """Encode every docstring of the standard library, search them, and leave nothing running.

    Starts Postgres, Valkey, API, scheduler, a worker, an indexer and Flower, submits some 8,700 texts over HTTP and
    counts the vectors that come back: it succeeds only if every text has one. Other tasks have demos of the same kind.

    Args:
        task: Compute vectors, scores of pairs, or records.
        data_dir (DIR): Use and keep this directory instead of a temporary one.
        keep: Keep the temporary directory, for `vectormill up`.
        api_url (URL): Use this running service instead of starting one.
        model (NAME|DIR): A registered model (see `vectormill models`) or a model's directory. By default the
            packaged one, which computes dense vectors and scores.
        items (N, from 2): Submit N items instead of the demo's default.
        outputs (LIST): Compute several outputs of each text instead, separated by commas: dense, sparse and
            multi_vector. Name a --model that has them.
        reindex: Show how a table is kept searchable instead: index it, change it, index it again.
    """
    from vectormill.client import Client

    if reindex and (task != EMBED or items is not None or api_url is not None):
        raise InvalidOption(
            "demo --reindex encodes a whole table in the embedded Postgres: it cannot be combined with --task, "
            "--items or --api-url."
        )
    if outputs is not None and (task != EMBED or reindex):
        raise InvalidOption("demo --outputs is a demo of its own: leave out --task and --reindex.")
    place = _Place(data_dir, keep, api_url, model)
    if reindex:
        _keep_searchable(place, is_json=json)
        return
    chosen = DEMOS[task] if outputs is None else demonstrate_outputs(outputs)
    with _service(place, chosen) as (name, wait_until_ready):
        texts = chosen.list_items(items)
        with Client(wait_until_ready()) as client:
            run_demo(client, chosen, texts, name, is_json=json)


@dataclass(frozen=True, slots=True)
class _Place:
    """The service or data directory on which a demo runs, and its model."""

    data_dir: Path | None
    keep: bool
    api_url: str | None
    model: str | None


@contextmanager
def _service(place: _Place, demo: TaskDemo) -> "Iterator[tuple[str | None, Callable[[], str]]]":
    """Yield the model's name, and a function that waits until the service is ready and returns the API's URL."""
    if place.api_url is not None:
        url = place.api_url
        if place.model is not None and Path(place.model).is_dir():
            raise InvalidOption(
                "With --api-url, --model must be a model that is registered with that service, not a directory."
            )
        yield place.model, lambda: url
        tell(f"Next: `vectormill submit FILE --collection NAME --api-url {url}` encodes your own texts.")
        return
    with _workplace(place, demo) as (_, name, wait_until_ready):
        yield name, wait_until_ready


@contextmanager
def _workplace(place: _Place, demo: TaskDemo) -> "Iterator[tuple[Path, str | None, Callable[[], str]]]":
    """Start a stack; yield its data directory, its model's name, and a function that waits for the API's URL."""
    from vectormill.cli.stack import Stack, workplace
    from vectormill.settings import load_settings

    settings = load_settings()  # raises an error for misspelt environment variables
    # Refuse an unusable model before the stack takes a minute to start.
    name, models = choose_model(demo, place.model, settings)
    # Runs copy only vectors that no later proof can find faulty, and the next run begins at once.
    variables = models | {"VECTORMILL_WORKER_PROOF_SECONDS": "1"}
    with (
        workplace(place.data_dir, place.keep) as directory,
        Stack(directory, name, variables=variables) as stack,
    ):
        tell(f"Starting Postgres, Valkey, API, scheduler, worker, indexer and Flower in {directory} …")
        yield directory, name, stack.wait_until_ready
    if place.keep or place.data_dir is not None:
        tell(
            f"Everything is kept. Next: `vectormill up --data-dir {shlex.quote(str(directory))}` starts it again."
        )
    else:
        tell("Next: `vectormill up` starts a service that stays, and says how to encode your own texts.")


def _keep_searchable(place: _Place, *, is_json: bool) -> None:
    """Run the demo of a followed table. Raise CommandFailed if the collection does not match the table."""
    import psycopg
    from sqlalchemy import make_url

    from vectormill.cli import reindexing_demo as reindexing
    from vectormill.cli.runs import look_at_run
    from vectormill.client import Client
    from vectormill.client.progress import Progress
    from vectormill.corpus import read_docstrings
    from vectormill.embedded.data_dir import find_running

    with _workplace(place, DEMOS[EMBED]) as (directory, name, wait_until_ready), ExitStack() as exits:
        client = exits.enter_context(Client(wait_until_ready()))
        running = find_running(directory)
        assert running is not None, "it has just said that it is ready"
        url = make_url(running.database_url).set(drivername="postgresql")
        connection = exits.enter_context(
            psycopg.connect(url.render_as_string(hide_password=False), autocommit=True)
        )
        reader = running.reader_database_url
        role = None if reader is None else make_url(reader).username
        num_rows = reindexing.make_table(connection, read_docstrings(), role)
        tell(f"Created the table {reindexing.TABLE} with {num_rows:,} docstrings of {describe_python()}.")
        reindexing.follow_table(client, name)

        def run(title: str) -> reindexing.Round:
            with Progress(look_at_run) as progress:
                return reindexing.reindex(client, connection, title, progress)

        rounds = [run("first run")]
        changes = reindexing.change_table(connection)
        tell("Changed the table: " + ", ".join(f"{number} {what}" for what, number in changes.items()) + ".")
        rounds += [run("after the changes"), run("nothing changed")]
        matches = client.search(
            reindexing.COLLECTION, reindexing.QUERY, limit=reindexing.NEAREST, filter=reindexing.FILTER
        )
        num_indexed = reindexing.count_rows(connection, reindexing.COLLECTION)
        num_rows = reindexing.count_rows(connection, reindexing.TABLE)
    reindexing.print_rounds(rounds, matches, is_json=is_json)
    if num_indexed != num_rows:
        raise CommandFailed(
            f"The table has {num_rows:,} rows, and the collection {num_indexed:,}.", ITEMS_FAILED
        )
