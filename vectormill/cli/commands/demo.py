"""demo: the main job from end to end, on every docstring of the running Python's standard library."""

import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from vectormill.cli.demos import pairs, records
from vectormill.cli.demos.task_demo import TaskDemo
from vectormill.cli.exits import EXIT_CODES_HELP, ITEMS_FAILED, CommandFailed, exit_code_of_job
from vectormill.cli.options import Json
from vectormill.domain.tasks.task import EMBED

if TYPE_CHECKING:
    from vectormill.cli.demos.task_demo import DemoModel
    from vectormill.cli.views.summary import Fact
    from vectormill.client import Client
    from vectormill.files.ndjson import ItemJson

app = typer.Typer()

# The demos of all tasks but `embed`, whose demo is the main job below.
TASK_DEMOS: Final[Mapping[str, TaskDemo]] = {demo.task: demo for demo in (pairs.DEMO, records.DEMO)}
# The values of --task for type checkers; a test compares them with the table.
DemoTask = Literal["embed", "score", "extract"]

COLLECTION: Final = "docstrings"
QUERIES: Final = ("how to parse a date", "compress data without loss", "run a function in another process")
NEAREST: Final = 5
POLL_SECONDS: Final = 0.25


@app.command(
    epilog="Examples: vectormill demo --keep\n\nvectormill demo --reindex\n\n"
    "vectormill demo --task score --model ./bge-reranker-base\n\n"
    "vectormill demo --task extract --model ./rex-uninlu\n\n"
    f"{EXIT_CODES_HELP}"
)
def demo(
    task: Annotated[
        DemoTask, typer.Option("--task", help="Compute vectors, scores of pairs, or records.")
    ] = EMBED,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir", metavar="DIR", help="Use and keep this directory instead of a temporary one."
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the temporary directory, for `vectormill up`.")
    ] = False,
    api_url: Annotated[
        str | None,
        typer.Option("--api-url", metavar="URL", help="Use this running service instead of starting one."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME|DIR",
            help="A registered model (see `vectormill models`) or a model's directory. By default, one that "
            "is available.",
            show_default=False,
        ),
    ] = None,
    items: Annotated[
        int | None,
        typer.Option(
            "--items",
            metavar="N",
            min=2,
            help="Submit N items instead of the demo's default.",
            show_default=False,
        ),
    ] = None,
    reindex: Annotated[
        bool,
        typer.Option(
            "--reindex",
            help="Show how a table is kept searchable instead: index it, change it, index it again.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Encode every docstring of the standard library, search them, and leave nothing running.

    Starts Postgres, Valkey, API, scheduler, a worker, an indexer and Flower, submits some 8,700 texts over HTTP and
    counts the vectors that come back: it succeeds only if every text has one. Other tasks have demos of the same kind.
    """
    from vectormill.domain.errors import InvalidOption

    if reindex and (task != EMBED or items is not None or api_url is not None):
        raise InvalidOption(
            "demo --reindex makes vectors of a whole table in a Postgres of its own: leave --task, --items and "
            "--api-url out."
        )
    place = _Place(data_dir, keep, api_url, model)
    if reindex:
        _keep_searchable(place, is_json=json)
    elif task == EMBED:
        _encode_docstrings(place, items, is_json=json)
    else:
        _run_task(place, TASK_DEMOS[task], items, is_json=json)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a demo runs, and with which model."""

    data_dir: Path | None
    keep: bool
    api_url: str | None
    model: str | None


def _encode_docstrings(place: _Place, num_items: int | None, *, is_json: bool) -> None:
    """Run the main demo. Raise CommandFailed unless every text has its vector."""
    from vectormill.cli.views.summary import summarize_job
    from vectormill.client import Client
    from vectormill.corpus import read_docstrings, take_evenly

    with _service(place) as (weights, wait_until_ready):
        docstrings = list(read_docstrings())
        chosen = take_evenly(docstrings, num_items or len(docstrings))
        texts = {docstring.key: docstring.text for docstring in chosen}
        with Client(wait_until_ready()) as client:
            job = _encode(client, texts, weights.model)
            num_vectors = _count_vectors(client, job["id"], texts)
            queries = QUERIES if num_vectors else ()
            matches = {query: client.search(COLLECTION, query, limit=NEAREST) for query in queries}
            summary = summarize_job(job, client.workers(), weights.reason)
            _report(job, summary, matches, texts, num_vectors=num_vectors, is_json=is_json)
    if num_vectors < len(texts):
        raise CommandFailed(
            f"{len(texts) - num_vectors:,} of {len(texts):,} texts have no vector; job {job['id']} {job['state']}.",
            exit_code_of_job(job["state"]) or ITEMS_FAILED,
        )


def _run_task(place: _Place, demo: TaskDemo, num_items: int | None, *, is_json: bool) -> None:
    """Run the demo of another task, on the named service or on a stack of its own."""
    from vectormill.cli.demos.task_demo import run_task
    from vectormill.client import Client

    with _service(place, demo) as (weights, wait_until_ready):
        items = demo.list_items(num_items or demo.num_items)
        _say(weights.told)
        with Client(wait_until_ready()) as client:
            run_task(client, demo, items, weights, is_json=is_json)


@contextmanager
def _service(place: _Place, demo: TaskDemo | None = None) -> "Iterator[tuple[DemoModel, Callable[[], str]]]":
    """Yield the model, and a function that waits for the service and returns the API's URL."""
    from vectormill.cli.demos.weights import find_remote

    if place.api_url is not None:
        url = place.api_url
        yield find_remote(place.model), lambda: url
        return
    with _workplace(place, demo) as (_, weights, wait_until_ready):
        yield weights, wait_until_ready


@contextmanager
def _workplace(
    place: _Place, demo: TaskDemo | None = None
) -> "Iterator[tuple[Path, DemoModel, Callable[[], str]]]":
    """Start a stack of our own; yield its data directory, its model, and a function that waits for its API's URL."""
    from vectormill.cli.demos.weights import choose_weights, register
    from vectormill.cli.stack import Stack, workplace
    from vectormill.settings import load_settings

    settings = load_settings()  # a misspelt variable is told here too
    with workplace(place.data_dir, place.keep) as directory:
        # A model that is wrong is told before a minute of starting.
        weights = choose_weights(demo, place.model, settings, directory)
        with Stack(directory, weights.model, variables=register(settings, weights)) as stack:
            _say(f"Starting Postgres, Valkey, API, scheduler, worker, indexer and Flower in {directory} …")
            yield directory, weights, stack.wait_until_ready
    if place.keep and place.data_dir is None:
        _say(f"Everything is kept: vectormill up --data-dir {directory}")


def _keep_searchable(place: _Place, *, is_json: bool) -> None:
    """Run the demo of a table that is followed. Raise CommandFailed unless the collection ends with the table's
    rows.
    """
    import psycopg
    from sqlalchemy import make_url

    from vectormill.cli.demos import reindexing
    from vectormill.cli.views.run_progress import look_at_run
    from vectormill.client import Client
    from vectormill.client.progress import Progress
    from vectormill.corpus import read_docstrings
    from vectormill.embedded.running import find_running

    with _workplace(place) as (directory, weights, wait_until_ready), ExitStack() as exits:
        client = exits.enter_context(Client(wait_until_ready()))
        running = find_running(directory)
        assert running is not None, "it has just said that it is ready"
        url = make_url(running.database_url).set(drivername="postgresql")
        connection = exits.enter_context(
            psycopg.connect(url.render_as_string(hide_password=False), autocommit=True)
        )
        num_rows = reindexing.make_table(connection, read_docstrings())
        _say(f"Made the table {reindexing.TABLE} with {num_rows:,} docstrings of {describe_python()}.")
        reindexing.follow_table(client, weights.model)

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


def _encode(client: "Client", texts: Mapping[str, str], model: str | None) -> Mapping[str, Any]:
    """Submit the texts over HTTP and show how the job goes, until it ends."""
    from vectormill.cli.views.job_watch import watch_job

    items: list[ItemJson] = [{"key": key, "text": text} for key, text in texts.items()]
    job = client.submit(items, model=model, collection=COLLECTION)
    _say(f"Submitted {job['num_items']:,} docstrings of {describe_python()} as job {job['id']}.")
    return watch_job(client, job, poll_seconds=POLL_SECONDS)


def _count_vectors(client: "Client", job_id: str, texts: Mapping[str, str]) -> int:
    """Count the texts that have a vector of finite numbers, whatever the job's state says."""
    found = {
        vector["key"]
        for vector in client.vectors(job_id, partial=True)
        if vector["embedding"] and all(map(math.isfinite, vector["embedding"]))
    }
    return len(found & texts.keys())


def _report(
    job: Mapping[str, Any],
    summary: Sequence["Fact"],
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
