"""demo: the main job from end to end, on every docstring of the running Python's standard library."""

import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from vectormill.cli.arguments.options import Json, Model
from vectormill.cli.exits import EXIT_CODES_HELP, ITEMS_FAILED, CommandFailed, exit_code_of_job

if TYPE_CHECKING:
    from vectormill.cli.views.summary import Line
    from vectormill.client import Client
    from vectormill.files.ndjson import ItemJson

app = typer.Typer()

COLLECTION: Final = "docstrings"
QUERIES: Final = ("how to parse a date", "compress data without loss", "run a function in another process")
NEAREST: Final = 5
POLL_SECONDS: Final = 0.25


@app.command(epilog=f"Examples: vectormill demo --keep\n\nvectormill demo --reindex\n\n{EXIT_CODES_HELP}")
def demo(
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", metavar="DIR", help="Use and keep this directory; else a temporary one."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the temporary directory, for `vectormill up`.")
    ] = False,
    api_url: Annotated[
        str | None,
        typer.Option("--api-url", metavar="URL", help="Use this running service instead of starting one."),
    ] = None,
    model: Model = None,
    reindex: Annotated[
        bool,
        typer.Option(
            "--reindex", help="Instead keep a table of them searchable: index it, change it, index it again."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Encode every docstring of the standard library, search them, leave nothing running.

    Starts Postgres, Valkey, API, scheduler, a worker, an indexer and Flower, submits some 8,700 texts over HTTP and
    counts the vectors that come back: it succeeds only if every text has one.
    """
    if reindex:
        _keep_searchable(data_dir, keep, api_url, model, is_json=json)
        return
    from vectormill.cli.views.summary import summarize_job
    from vectormill.client import Client
    from vectormill.corpus import read_docstrings

    with _service(data_dir, keep, api_url, model) as wait_until_ready:
        texts = {docstring.key: docstring.text for docstring in read_docstrings()}
        with Client(wait_until_ready()) as client:
            job = _encode(client, texts, model)
            num_vectors = _count_vectors(client, job["id"], texts)
            queries = QUERIES if num_vectors else ()
            matches = {query: client.search(COLLECTION, query, limit=NEAREST) for query in queries}
            summary = summarize_job(job, client.workers(), "the default" if model is None else "asked for")
            _report(job, summary, matches, texts, num_vectors=num_vectors, is_json=json)
    if num_vectors < len(texts):
        raise CommandFailed(
            f"{len(texts) - num_vectors:,} of {len(texts):,} texts have no vector; job {job['id']} {job['state']}.",
            exit_code_of_job(job["state"]) or ITEMS_FAILED,
        )


@contextmanager
def _service(
    data_dir: Path | None, keep: bool, api_url: str | None, model: str | None
) -> Iterator[Callable[[], str]]:
    """Something to call for the API's URL, which waits until it is there: a stack of our own starts meanwhile."""
    if api_url is not None:
        yield lambda: api_url
        return
    with _workplace(data_dir, keep, model) as (_, wait_until_ready):
        yield wait_until_ready


@contextmanager
def _workplace(
    data_dir: Path | None, keep: bool, model: str | None
) -> Iterator[tuple[Path, Callable[[], str]]]:
    """The data directory of a stack of our own, and what waits for its API's URL."""
    from vectormill.cli.stack import Stack
    from vectormill.cli.workplace import workplace
    from vectormill.models.registry import Registry
    from vectormill.settings import load_settings

    settings = load_settings()  # a misspelt variable is told here too
    if model is not None:
        Registry(settings.models).entry(model)  # a wrong name is told before a minute of starting

    with workplace(data_dir, keep) as directory, Stack(directory, model) as stack:
        _say(f"Starting Postgres, Valkey, API, scheduler, worker, indexer and Flower in {directory} …")
        yield directory, stack.wait_until_ready
    if keep and data_dir is None:
        _say(f"Everything is kept: vectormill up --data-dir {directory}")


def _keep_searchable(
    data_dir: Path | None, keep: bool, api_url: str | None, model: str | None, *, is_json: bool
) -> None:
    """The demo of a table that is followed: it succeeds only if the collection has the table's rows at the end."""
    import psycopg
    from sqlalchemy import make_url

    from vectormill.cli import reindexing
    from vectormill.cli.views.progress import Progress
    from vectormill.cli.views.run_progress import look_at_run
    from vectormill.client import Client
    from vectormill.corpus import read_docstrings
    from vectormill.domain.errors import InvalidOption
    from vectormill.embedded.running import find_running

    if api_url is not None:
        raise InvalidOption("demo --reindex makes a table in a Postgres of its own; leave --api-url out.")
    with _workplace(data_dir, keep, model) as (directory, wait_until_ready), ExitStack() as exits:
        client = exits.enter_context(Client(wait_until_ready()))
        running = find_running(directory)
        assert running is not None, "it has just said that it is ready"
        url = make_url(running.database_url).set(drivername="postgresql")
        connection = exits.enter_context(
            psycopg.connect(url.render_as_string(hide_password=False), autocommit=True)
        )
        num_rows = reindexing.make_table(connection, read_docstrings())
        _say(f"Made the table {reindexing.TABLE} with {num_rows:,} docstrings of {describe_python()}.")
        reindexing.follow_table(client, model)

        def run(title: str) -> reindexing.Round:
            with Progress(look_at_run) as progress:
                return reindexing.reindex(client, connection, title, progress)

        rounds = [run("first run")]
        changes = reindexing.change_table(connection)
        _say("Changed the table: " + ", ".join(f"{number} {what}" for what, number in changes.items()) + ".")
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


def _encode(client: "Client", texts: Mapping[str, str], model: str | None) -> dict[str, Any]:
    """Submits the texts over HTTP and shows how the job goes, until it ends."""
    from vectormill.cli.views.job_progress import look_at_job
    from vectormill.cli.views.progress import Progress

    items: list[ItemJson] = [{"key": key, "text": text} for key, text in texts.items()]
    job = client.submit(items, model=model, collection=COLLECTION)
    _say(f"Submitted {job['num_items']:,} docstrings of {describe_python()} as job {job['id']}.")
    with Progress(look_at_job) as progress:
        return client.wait(job["id"], progress, poll_seconds=POLL_SECONDS)


def _count_vectors(client: "Client", job_id: str, texts: Mapping[str, str]) -> int:
    """Texts that have a vector of finite numbers; the job's state is not taken on trust."""
    found = {
        vector["key"]
        for vector in client.vectors(job_id, partial=True)
        if vector["embedding"] and all(map(math.isfinite, vector["embedding"]))
    }
    return len(found & texts.keys())


def _report(
    job: Mapping[str, Any],
    summary: Sequence["Line"],
    matches: Mapping[str, Sequence[Mapping[str, Any]]],
    texts: Mapping[str, str],
    *,
    num_vectors: int,
    is_json: bool,
) -> None:
    from vectormill.cli.views.listing import print_json, print_report

    if is_json:
        choices = {line.name: {"value": line.value, "reason": line.reason} for line in summary}
        print_json({"job": job, "num_vectors": num_vectors, "summary": choices, "searches": matches})
        return
    print_report("The job", ("", "", ""), [(line.name, line.value, line.reason) for line in summary])
    for query, nearest in matches.items():
        rows = [
            (f"{match['score']:.3f}", match["key"], first_line(texts.get(match["key"], "")))
            for match in nearest
        ]
        print_report(f"Nearest to: {query}", ("score", "docstring of", "first line"), rows)
    typer.echo(f"\n{num_vectors:,} of {len(texts):,} texts have their vector.")


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def describe_python() -> str:
    return f"Python {platform.python_version()}"


def _say(sentence: str) -> None:
    typer.echo(sentence, err=True)
