"""The demos of `vectormill demo`, one for each task: their items, and reports.

`embed`    every docstring of the running Python's standard library, which is searched afterwards
           with `--outputs`, some docstrings, to several outputs of a model that has them
`score`    the first sentence of a docstring, paired with its own rest and with the rest of another docstring:
           a trained model scores the own rest higher; random weights do so half of the time
`extract`  persons, places, dates and organizations in English sentences

All have the weights of a trained model: the packaged one, or the one that is named where that lacks the task or output.
"""

import json
import math
import platform
import re
import shlex
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from vectormill.cli.exits import ITEMS_FAILED, CommandFailed, exit_code_of_job
from vectormill.cli.jobs import summarize_job, watch_job
from vectormill.cli.printing import print_json, print_report, tell
from vectormill.cli.spans import mark_spans
from vectormill.domain.encoding import DEFAULT_MODEL, EncodingOptions
from vectormill.domain.errors import InvalidOption
from vectormill.domain.schema import Schema
from vectormill.domain.task import DENSE, EMBED, EXTRACT, JUDGE, MULTI_VECTOR, SPARSE

if TYPE_CHECKING:
    from vectormill.client import Client
    from vectormill.files.ndjson import ItemJson
    from vectormill.settings import Settings

POLL_SECONDS: Final = 0.25
COLLECTION: Final = "docstrings"
QUERIES: Final = ("how to parse a date", "compress data without loss", "run a function in another process")
NEAREST: Final = 5
OWN: Final = "own"
OTHER: Final = "other"
NUM_PAIRS: Final = 2000
NUM_SHOWN_PAIRS: Final = 4
SHOWN_CHARS: Final = 44
SCHEMA: Final[Schema] = dict.fromkeys(("person", "place", "date", "organization"))
SENTENCES: Final = (
    "Marie Curie was born in Warsaw in 1867 and won the Nobel Prize in Physics in 1903.",
    "Larry Page and Sergey Brin founded Google in California in 1998.",
    "Jane Austen, who wrote Emma, was born in Steventon in 1775.",
    "The Summer Olympics of 2008 were opened in Beijing on 8 August.",
    "Albert Einstein was born in Ulm in 1879 and moved to Princeton in 1933.",
    "Alan Turing was born in London in 1912 and studied at the University of Cambridge.",
    "The Eiffel Tower in Paris was completed in 1889.",
    "Bill Gates and Paul Allen founded Microsoft in 1975.",
    "The Yangtze flows into the East China Sea near Shanghai.",
    "Johannes Gutenberg printed books in Mainz around 1450.",
)
NUM_SHOWN_TEXTS: Final = 5
NUM_MANY_OUTPUTS: Final = 500
# The field of each output in a line of results.
OUTPUT_FIELDS: Final = {DENSE: "embedding", SPARSE: "sparse", MULTI_VECTOR: "multi_vector"}

Json = Mapping[str, Any]
# The results of a job, by the key of the item.
Results = Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The result of a demo: tables for people, with titles, columns and rows, and figures for machines."""

    tables: Sequence[tuple[str, tuple[str, ...], Sequence[Sequence[str]]]]
    figures: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TaskDemo:
    """The demo of a task.

    `list_items` takes the number of items, or None for the default. `options` are those of the job, `is_sound`
    says whether a result is valid, and `find` makes the report on valid results. `note` is about the default
    model.
    """

    task: str
    noun: str
    list_items: Callable[[int | None], Sequence["ItemJson"]]
    read_results: Callable[["Client", str], Iterator[Json]]
    is_sound: Callable[[Json], bool]
    find: Callable[["Client", Sequence["ItemJson"], Results], DemoReport]
    options: Mapping[str, Any] = field(default_factory=dict)
    result: str = "result"
    note: str = ""


def run_demo(
    client: "Client", demo: TaskDemo, items: Sequence["ItemJson"], model: str | None, *, is_json: bool
) -> None:
    """Run a demo on a service, with this model or the default.

    Raise CommandFailed unless every item has a valid result, whatever the job's state.
    """
    if model is None and demo.note:
        tell(demo.note)
    submitted = client.submit(items, model=model, task=demo.task, **demo.options)
    tell(f"Submitted {submitted['num_items']:,} {demo.noun}s as job {submitted['id']}.")
    job = watch_job(client, submitted, poll_seconds=POLL_SECONDS)
    wanted = {item["key"] for item in items}
    results = {
        result["key"]: result
        for result in demo.read_results(client, job["id"])
        if result["key"] in wanted and demo.is_sound(result)
    }
    report = demo.find(client, items, results)
    summary = summarize_job(job, client.workers(), "the default" if model is None else "requested")
    if is_json:
        choices = {fact.name: {"value": fact.value, "reason": fact.reason} for fact in summary}
        print_json({"job": job, f"num_{demo.result}s": len(results), "summary": choices, **report.figures})
    else:
        print_report("The job", ("", "", ""), [(fact.name, fact.value, fact.reason) for fact in summary])
        for title, columns, rows in report.tables:
            print_report(title, columns, rows)
        typer.echo(f"\n{len(results):,} of {job['num_items']:,} {demo.noun}s have their {demo.result}.")
    if len(results) < len(items):
        raise CommandFailed(
            f"{len(items) - len(results):,} of {len(items):,} {demo.noun}s have no {demo.result}; job {job['id']} "
            f"{job['state']}.",
            exit_code_of_job(job["state"]) or ITEMS_FAILED,
        )


def list_docstrings(num_texts: int | None) -> "list[ItemJson]":
    from vectormill.corpus import read_docstrings, take_evenly

    docstrings = list(read_docstrings())
    chosen = take_evenly(docstrings, num_texts or len(docstrings))
    tell(f"The texts are docstrings of {describe_python()}.")
    return [{"key": docstring.key, "text": docstring.text} for docstring in chosen]


def describe_python() -> str:
    return f"Python {platform.python_version()}"


def read_vectors(client: "Client", job_id: str) -> Iterator[Json]:
    """Yield the key of each vector and whether its numbers are finite. The vectors are not kept."""
    for vector in client.vectors(job_id, partial=True):
        yield {
            "key": vector["key"],
            "is_finite": bool(vector["embedding"]) and all(map(math.isfinite, vector["embedding"])),
        }


def search_docstrings(
    client: "Client", items: Sequence["ItemJson"], results: Results, outputs: Sequence[str] | None = None
) -> DemoReport:
    """Search for some queries, unless there are no results to search, and return the matches.

    `outputs` are those that are compared, the default ones if None.
    """
    queries = QUERIES if results else ()
    found = {query: client.search(COLLECTION, query, outputs=outputs, limit=NEAREST) for query in queries}
    texts = {item["key"]: item["text"] for item in items}
    tables = [
        (
            f"Nearest to: {query}",
            ("score", "docstring of", "first line"),
            [
                (f"{match['score']:.3f}", match["key"], first_line(texts.get(match["key"], "")))
                for match in matches
            ],
        )
        for query, matches in found.items()
    ]
    return DemoReport(tables, {"searches": found})


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def list_pairs(num_pairs: int | None) -> "list[ItemJson]":
    """Return two pairs for each docstring: with its own rest, and with another docstring's rest."""
    from vectormill.corpus import read_docstrings, split_first_sentence, take_evenly

    parts = [
        (docstring.key, sentence, rest)
        for docstring in read_docstrings()
        for sentence, rest in [split_first_sentence(docstring.text)]
        if sentence and rest
    ]
    chosen = take_evenly(parts, (num_pairs or NUM_PAIRS) // 2)
    pairs: list[ItemJson] = []
    for number, (key, sentence, rest) in enumerate(chosen):
        other = chosen[(number + len(chosen) // 2) % len(chosen)][2]
        pairs.append({"key": f"{key}/{OWN}", "text": sentence, "text_pair": rest})
        pairs.append({"key": f"{key}/{OTHER}", "text": sentence, "text_pair": other})
    return pairs


def compare_scores(client: "Client", pairs: Sequence["ItemJson"], results: Results) -> DemoReport:
    """Report how well the scores separate a sentence's own continuation from that of another sentence."""
    scores = {key: float(result["score"]) for key, result in results.items()}
    by_kind = {
        kind: {key.removesuffix(kind): score for key, score in scores.items() if key.endswith(f"/{kind}")}
        for kind in (OWN, OTHER)
    }
    both = [(own, by_kind[OTHER][key]) for key, own in by_kind[OWN].items() if key in by_kind[OTHER]]
    share = sum(own > other for own, other in both) / len(both) if both else 0.0
    medians = {kind: statistics.median(found.values()) if found else None for kind, found in by_kind.items()}
    shown = {kind: "-" if median is None else f"{median:.3f}" for kind, median in medians.items()}
    rows = [
        ("sentences with their own rest", f"{len(by_kind[OWN]):,}", shown[OWN]),
        ("with another's rest", f"{len(by_kind[OTHER]):,}", shown[OTHER]),
        ("own rest scored higher", f"{share:.1%}", ""),
    ]
    shorten = partial(textwrap.shorten, width=SHOWN_CHARS, placeholder=" …")
    examples = [
        (f"{scores[pair['key']]:.3f}", shorten(pair["text"]), shorten(pair["text_pair"]))
        for pair in [pair for pair in pairs if pair["key"] in scores][: 2 * NUM_SHOWN_PAIRS]
    ]
    tables = (
        ("How well the scores separate the pairs", ("", "pairs", "median score"), rows),
        ("Some pairs", ("score", "text", "text_pair"), examples),
    )
    return DemoReport(tables, {"findings": {"median_scores": medians, "own_scored_higher": share}})


def list_sentences(num_texts: int | None) -> "list[ItemJson]":
    """Return the given number of sentences, repeated if necessary; equal sentences are encoded only once."""
    return [
        {"key": f"text-{number + 1}", "text": SENTENCES[number % len(SENTENCES)]}
        for number in range(num_texts or len(SENTENCES))
    ]


def read_records(client: "Client", job_id: str) -> Iterator[Json]:
    return client.records(job_id, partial=True)


def is_record(result: Json) -> bool:
    """Return whether every record of a result is a path of at least one step."""
    return all(step["type"] for record in result["output"] for step in record) and all(result["output"])


def count_records(client: "Client", items: Sequence["ItemJson"], results: Results) -> DemoReport:
    """Count the records of each type, and list some texts with their spans marked."""
    paths = Counter(
        "/".join(step["type"] for step in record)
        for result in results.values()
        for record in result["output"]
    )
    # Show items with records before items without.
    there = [item for item in items if item["key"] in results]
    shown = sorted(there, key=lambda item: not results[item["key"]]["output"])[:NUM_SHOWN_TEXTS]
    examples = [(item["key"], mark_spans(item["text"], results[item["key"]]["output"])) for item in shown]
    tables = (
        ("What was found", ("type", "records"), [(path, f"{paths[path]:,}") for path in sorted(paths)]),
        ("Some texts with their spans", ("", "text"), examples),
    )
    return DemoReport(tables, {"findings": {"records": dict(paths)}})


DEMOS: Final[Mapping[str, TaskDemo]] = {
    demo.task: demo
    for demo in (
        TaskDemo(
            task=EMBED,
            noun="text",
            result="vector",
            list_items=list_docstrings,
            read_results=read_vectors,
            is_sound=lambda result: bool(result["is_finite"]),
            find=search_docstrings,
            options={"collection": COLLECTION, "outputs": DENSE},
        ),
        TaskDemo(
            task=JUDGE,
            noun="pair",
            list_items=list_pairs,
            read_results=lambda client, job_id: client.scores(job_id, partial=True),
            is_sound=lambda result: math.isfinite(result["score"]),
            find=compare_scores,
            note=f"A score is the cosine of two vectors of {DEFAULT_MODEL}. For scores of a classifier, which "
            "reads both texts at once, pass its name or directory to --model.",
        ),
        TaskDemo(
            task=EXTRACT,
            noun="text",
            list_items=list_sentences,
            read_results=read_records,
            is_sound=is_record,
            find=count_records,
            options={"extract_schema": json.dumps(SCHEMA)},
        ),
    )
}


def demonstrate_outputs(outputs: str) -> TaskDemo:
    """Return the demo of a model that computes these outputs of a text, which are then searched together."""
    names = [name.strip() for name in outputs.split(",")]
    if set(names) == {DENSE}:
        return DEMOS[EMBED]

    def is_sound(result: Json) -> bool:
        return all(result[OUTPUT_FIELDS[name]] for name in names if name in OUTPUT_FIELDS)

    return replace(
        DEMOS[EMBED],
        list_items=lambda num_texts: list_docstrings(num_texts or NUM_MANY_OUTPUTS),
        read_results=read_records,
        is_sound=is_sound,
        find=partial(search_docstrings, outputs=names),
        options={"collection": COLLECTION, "outputs": outputs},
        result="output",
    )


def choose_model(
    demo: TaskDemo, model: str | None, settings: "Settings"
) -> tuple[str | None, dict[str, str]]:
    """Return the name of a demo's model, None for the default, and the environment variables that register it.

    `model` is a name or a directory. Raise UnknownModel, ModelError, or InvalidOption, which names a model and the
    commands if this one does not compute what the demo shows.
    """
    from vectormill.models.registry import Registry, make_spec, name_added, read_added
    from vectormill.models.suggestions import SUGGESTIONS
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
        variables = {f"{PREFIX}MODELS": json.dumps(entries)}
    own = {name: value for name, value in demo.options.items() if name != "collection"}
    if model is None and DEFAULT_MODEL not in Registry(models).names():
        return model, variables  # the start of the service says which package to install
    try:
        make_spec(Registry(models).card(model or DEFAULT_MODEL), EncodingOptions(task=demo.task, **own))
    except InvalidOption as error:
        row = next((row for row in SUGGESTIONS if row.command in str(error)), None)
        if row is None:
            raise
        way = ["--outputs", own["outputs"]] if "outputs" in own else ["--task", demo.task]
        again = shlex.join(["vectormill", "demo", *way, "--model", row.name])
        raise InvalidOption(f"{error} Then run `{again}`.") from None
    return model, variables
