"""The command demo, which runs a whole job on the docstrings of the running Python's standard library."""

import json as json_text
import math
import platform
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from vectormill.cli.command import command, top
from vectormill.cli.exits import EXIT_CODES_HELP, ITEMS_FAILED, CommandFailed, exit_code_of_job
from vectormill.cli.jobs import summarize_job, watch_job
from vectormill.cli.printing import print_json, print_report, tell
from vectormill.domain.encoding import DEFAULT_MODEL, EncodingOptions
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import DENSE, EMBED

if TYPE_CHECKING:
    from vectormill.settings import Settings

POLL_SECONDS: Final = 0.25
COLLECTION: Final = "docstrings"
QUERIES: Final = ("how to parse a date", "compress data without loss", "run a function in another process")
NEAREST: Final = 5


@command(top, "vectormill demo --keep", "vectormill demo --model ./bge-m3", note=EXIT_CODES_HELP)
def demo(
    *,
    data_dir: Path | None = None,
    keep: bool = False,
    api_url: str | None = None,
    model: str | None = None,
    items: int | None = None,
    json: bool = False,
) -> None:
    """Encode every docstring of the standard library, search them, and leave nothing running.

    Starts Postgres, Valkey, API, scheduler, a worker, an indexer and Flower, submits some 8,700 texts over HTTP and
    counts the vectors that come back: it succeeds only if every text has one.

    Args:
        data_dir (DIR): Use and keep this directory instead of a temporary one.
        keep: Keep the temporary directory, for `vectormill up`.
        api_url (URL): Use this running service instead of starting one.
        model (NAME|DIR): A registered model (see `vectormill models`) or a model's directory, by default the
            packaged one.
        items (N, from 2): Submit N texts instead of all.
    """
    from vectormill.client import Client
    from vectormill.corpus import read_docstrings, take_evenly

    with _service(data_dir, keep, api_url, model) as (name, wait_until_ready):
        docstrings = list(read_docstrings())
        texts = {each.key: each.text for each in take_evenly(docstrings, items or len(docstrings))}
        with Client(wait_until_ready()) as client:
            submitted = client.submit(
                [{"key": key, "text": text} for key, text in texts.items()],
                model=name,
                collection=COLLECTION,
                task=EMBED,
                outputs=DENSE,
            )
            tell(
                f"Submitted {submitted['num_items']:,} docstrings of Python {platform.python_version()} as job "
                f"{submitted['id']}."
            )
            job = watch_job(client, submitted, poll_seconds=POLL_SECONDS)
            # The vectors themselves are not kept.
            encoded = {
                vector["key"]
                for vector in client.vectors(job["id"], partial=True)
                if vector["embedding"] and all(map(math.isfinite, vector["embedding"]))
            } & texts.keys()
            found = {query: client.search(COLLECTION, query, limit=NEAREST) for query in QUERIES if encoded}
            summary = summarize_job(job, client.workers(), "the default" if name is None else "requested")
        if json:
            choices = {fact.name: {"value": fact.value, "reason": fact.reason} for fact in summary}
            print_json({"job": job, "num_vectors": len(encoded), "summary": choices, "searches": found})
        else:
            print_report("The job", ("", "", ""), [(fact.name, fact.value, fact.reason) for fact in summary])
            for query, matches in found.items():
                rows = [
                    (
                        f"{match['score']:.3f}",
                        match["key"],
                        texts.get(match["key"], "").strip().partition("\n")[0],
                    )
                    for match in matches
                ]
                print_report(f"Nearest to: {query}", ("score", "docstring of", "first line"), rows)
            typer.echo(f"\n{len(encoded):,} of {job['num_items']:,} texts have their vector.")
        # Vectors are counted, whatever the job's state.
        if len(encoded) < len(texts):
            raise CommandFailed(
                f"{len(texts) - len(encoded):,} of {len(texts):,} texts have no vector; job {job['id']} "
                f"{job['state']}.",
                exit_code_of_job(job["state"]) or ITEMS_FAILED,
            )


@contextmanager
def _service(
    data_dir: Path | None, keep: bool, api_url: str | None, model: str | None
) -> "Iterator[tuple[str | None, Callable[[], str]]]":
    """Yield the model's name, and a function that waits until the service is ready and returns the API's URL."""
    from vectormill.cli.stack import Stack, workplace
    from vectormill.settings import load_settings

    if api_url is not None:
        if model is not None and Path(model).is_dir():
            raise InvalidOption(
                "With --api-url, --model must be a model that is registered with that service, not a directory."
            )
        yield model, lambda: api_url
        tell(f"Next: `vectormill submit FILE --collection NAME --api-url {api_url}` encodes your own texts.")
        return
    settings = load_settings()  # raises an error for misspelt environment variables
    # Refuse an unusable model before the stack takes a minute to start.
    name, variables = choose_model(model, settings)
    with workplace(data_dir, keep) as directory, Stack(directory, name, variables=variables) as stack:
        tell(f"Starting Postgres, Valkey, API, scheduler, worker, indexer and Flower in {directory} …")
        yield name, stack.wait_until_ready
    if keep or data_dir is not None:
        tell(
            f"Everything is kept. Next: `vectormill up --data-dir {shlex.quote(str(directory))}` starts it again."
        )
    else:
        tell("Next: `vectormill up` starts a service that stays, and says how to encode your own texts.")


def choose_model(model: str | None, settings: "Settings") -> tuple[str | None, dict[str, str]]:
    """Return the name of the demo's model, None for the default, and the environment variables that register it.

    `model` is a name or a directory. Raise UnknownModel, ModelError, or InvalidOption if it has no dense vectors.
    """
    from vectormill.models.registry import Registry, make_spec, name_added, read_added
    from vectormill.settings import PREFIX, ModelEntry

    models, variables = dict(settings.models), dict[str, str]()
    if model is not None:
        models = read_added(name_added(settings)) | models
        path = Path(model).expanduser()
        if model not in Registry(models).names() and path.is_dir():
            model = re.sub(r"[^\w.-]+", "-", path.resolve().name)
            models[model] = ModelEntry(path=str(path.resolve()))
        # The demo's service has a data directory of its own, without the models of `vectormill models add`.
        entries = {name: entry.options for name, entry in models.items()}
        variables = {f"{PREFIX}MODELS": json_text.dumps(entries)}
    if model is None and DEFAULT_MODEL not in Registry(models).names():
        return model, variables  # the start of the service says which package to install
    make_spec(Registry(models).card(model or DEFAULT_MODEL), EncodingOptions(task=EMBED, outputs=DENSE))
    return model, variables
