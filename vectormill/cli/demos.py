"""The demos of `vectormill demo`, one for each task: their models, items, and reports.

`embed`    every docstring of the running Python's standard library, which is searched afterwards
           with `--outputs`, some docstrings, to several outputs of a model with random weights
`score`    the first sentence of a docstring, paired with its own rest and with the rest of another docstring:
           a trained model scores the own rest higher; random weights do so half of the time
`extract`  persons, places, times and organizations in Chinese sentences, because the published model of this
           kind, RexUniNLU, reads Chinese; this package has none of its weights
"""

import json
import math
import platform
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from vectormill.cli.exits import ITEMS_FAILED, CommandFailed, exit_code_of_job
from vectormill.cli.jobs import summarize_job, watch_job
from vectormill.cli.printing import print_json, print_report, tell
from vectormill.cli.spans import mark_spans
from vectormill.domain.encoding import DEFAULT_MODEL
from vectormill.domain.errors import InvalidOption
from vectormill.domain.schema import Schema
from vectormill.domain.task import DENSE, EMBED, EXTRACT, JUDGE, MULTI_VECTOR, SPARSE

if TYPE_CHECKING:
    from vectormill.client import Client
    from vectormill.files.ndjson import ItemJson
    from vectormill.settings import ModelEntry, Settings

POLL_SECONDS: Final = 0.25
COLLECTION: Final = "docstrings"
QUERIES: Final = ("how to parse a date", "compress data without loss", "run a function in another process")
NEAREST: Final = 5
OWN: Final = "own"
OTHER: Final = "other"
NUM_PAIRS: Final = 2000
NUM_SHOWN_PAIRS: Final = 4
SHOWN_CHARS: Final = 44
SCHEMA: Final[Schema] = {
    "人物": {"出生地": None, "作品": None},
    "地理位置": None,
    "时间": None,
    "组织机构": {"创始人": None},
}
SENTENCES: Final = (
    "居里夫人1867年出生于华沙,1903年与丈夫一起获得诺贝尔物理学奖。",
    "1998年,拉里·佩奇和谢尔盖·布林在加利福尼亚创办了谷歌公司。",
    "鲁迅原名周树人,1881年出生于浙江绍兴,是《狂人日记》的作者。",
    "2008年8月8日,第二十九届夏季奥林匹克运动会在北京开幕。",
    "爱因斯坦1879年出生于德国乌尔姆,1933年移居美国普林斯顿。",
    "艾伦·图灵1912年出生于伦敦,毕业于剑桥大学。",
    "埃菲尔铁塔位于法国巴黎,1889年建成。",
    "比尔·盖茨和保罗·艾伦于1975年创办了微软公司。",
    "长江全长六千三百多公里,在上海注入东海。",
    "曹雪芹生于南京,著有《红楼梦》。",
)
NUM_SHOWN_TEXTS: Final = 5
RANDOM: Final = "random-extractor"
RANDOM_EMBEDDER: Final = "random-bge-m3"
NUM_MANY_OUTPUTS: Final = 500
# The field of each output in a line of results.
OUTPUT_FIELDS: Final = {DENSE: "embedding", SPARSE: "sparse", MULTI_VECTOR: "multi_vector"}

Json = Mapping[str, Any]
# The results of a job, by the key of the item.
Results = Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model by its name, None for the service's default; `path` is its directory if it is not registered.

    `reason` says in a few words why this model was chosen; `told` describes its weights in a sentence.
    """

    model: str | None
    reason: str
    told: str
    path: Path | None = None


DEFAULT: Final = DemoModel(
    None, "the default", f"The model is {DEFAULT_MODEL}, the one of jobs that name no other."
)


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The result of a demo: tables for people, with titles, columns and rows, and figures for machines."""

    tables: Sequence[tuple[str, tuple[str, ...], Sequence[Sequence[str]]]]
    figures: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TaskDemo:
    """The demo of a task.

    `choose_weights` takes a directory that exists as long as the demo. `list_items` takes the number of
    items, or None for the default. `options` are those of the job, `is_sound` says whether a result is valid,
    and `find` makes the report on valid results.
    """

    task: str
    noun: str
    choose_weights: Callable[[Path], DemoModel]
    list_items: Callable[[int | None], Sequence["ItemJson"]]
    read_results: Callable[["Client", str], Iterator[Json]]
    is_sound: Callable[[Json], bool]
    find: Callable[["Client", Sequence["ItemJson"], Results], DemoReport]
    options: Mapping[str, Any] = field(default_factory=dict)
    result: str = "result"


def run_demo(
    client: "Client", demo: TaskDemo, items: Sequence["ItemJson"], weights: DemoModel, *, is_json: bool
) -> None:
    """Run a demo on a service.

    Raise CommandFailed unless every item has a valid result, whatever the job's state.
    """
    submitted = client.submit(items, model=weights.model, task=demo.task, **demo.options)
    tell(f"Submitted {submitted['num_items']:,} {demo.noun}s as job {submitted['id']}.")
    job = watch_job(client, submitted, poll_seconds=POLL_SECONDS)
    wanted = {item["key"] for item in items}
    results = {
        result["key"]: result
        for result in demo.read_results(client, job["id"])
        if result["key"] in wanted and demo.is_sound(result)
    }
    report = demo.find(client, items, results)
    summary = summarize_job(job, client.workers(), weights.reason)
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


def choose_embedder(directory: Path) -> DemoModel:
    """Return the packaged model, whose weights are trained but not for classification."""
    return DemoModel(
        DEFAULT_MODEL,
        "the default",
        f"The weights are those of {DEFAULT_MODEL}, an embedding model: a score is the cosine of two vectors. "
        "To score with a classifier, which reads both texts at once, pass its directory to --model.",
    )


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
    by_kind = {kind: _pick(pairs, scores, kind) for kind in (OWN, OTHER)}
    both = [(own, by_kind[OTHER][key]) for key, own in by_kind[OWN].items() if key in by_kind[OTHER]]
    share = sum(own > other for own, other in both) / len(both) if both else 0.0
    medians = {kind: statistics.median(found.values()) if found else None for kind, found in by_kind.items()}
    rows = [
        ("sentences with their own rest", f"{len(by_kind[OWN]):,}", _write(medians[OWN])),
        ("with another's rest", f"{len(by_kind[OTHER]):,}", _write(medians[OTHER])),
        ("own rest scored higher", f"{share:.1%}", ""),
    ]
    shown = [pair for pair in pairs if pair["key"] in scores][: 2 * NUM_SHOWN_PAIRS]
    examples = [
        (_write(scores[pair["key"]]), _shorten(pair["text"]), _shorten(pair["text_pair"])) for pair in shown
    ]
    tables = (
        ("How well the scores separate the pairs", ("", "pairs", "median score"), rows),
        ("Some pairs", ("score", "text", "text_pair"), examples),
    )
    return DemoReport(tables, {"findings": {"median_scores": medians, "own_scored_higher": share}})


def _pick(pairs: Sequence["ItemJson"], scores: dict[str, float], kind: str) -> dict[str, float]:
    """Return the scores of one kind of pair, keyed by the docstring's name."""
    keys = [pair["key"] for pair in pairs if pair["key"].endswith(f"/{kind}")]
    return {key.removesuffix(f"/{kind}"): scores[key] for key in keys if key in scores}


def _write(score: float | None) -> str:
    return "-" if score is None else f"{score:.3f}"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS - 1]}…"


def write_extractor(directory: Path) -> DemoModel:
    """Write a tiny model with random weights and the packaged tokenizer into the directory, and return it."""
    from vectormill.models.random_extractor import TINY, write_random_extractor
    from vectormill.models.registry import Registry

    tokenizer = Registry({}).card(DEFAULT_MODEL, weights=True).path
    return DemoModel(
        RANDOM,
        "no other is available",
        "This package includes no extraction model: the weights are tiny and random, and the records are "
        "meaningless. To use a RexUniNLU model, pass its directory to --model.",
        write_random_extractor(TINY, tokenizer, directory / RANDOM),
    )


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
            choose_weights=lambda directory: DEFAULT,
            list_items=list_docstrings,
            read_results=read_vectors,
            is_sound=lambda result: bool(result["is_finite"]),
            find=search_docstrings,
            options={"collection": COLLECTION},
        ),
        TaskDemo(
            task=JUDGE,
            noun="pair",
            choose_weights=choose_embedder,
            list_items=list_pairs,
            read_results=lambda client, job_id: client.scores(job_id, partial=True),
            is_sound=lambda result: math.isfinite(result["score"]),
            find=compare_scores,
        ),
        TaskDemo(
            task=EXTRACT,
            noun="text",
            choose_weights=write_extractor,
            list_items=list_sentences,
            read_results=read_records,
            is_sound=is_record,
            find=count_records,
            options={"extract_schema": json.dumps(SCHEMA, ensure_ascii=False)},
        ),
    )
}


def demonstrate_outputs(outputs: str) -> TaskDemo:
    """Return the demo of a model that computes several outputs of a text, which are then searched together."""
    names = [name.strip() for name in outputs.split(",")]

    def is_sound(result: Json) -> bool:
        return all(result[OUTPUT_FIELDS[name]] for name in names if name in OUTPUT_FIELDS)

    return TaskDemo(
        task=EMBED,
        noun="text",
        choose_weights=write_embedder,
        list_items=lambda num_texts: list_docstrings(num_texts or NUM_MANY_OUTPUTS),
        read_results=read_records,
        is_sound=is_sound,
        find=partial(search_docstrings, outputs=names),
        options={"collection": COLLECTION, "outputs": outputs},
        result="output",
    )


def write_embedder(directory: Path) -> DemoModel:
    """Write a small model with random weights and three outputs into the directory, and return it."""
    from vectormill.models.random_embedder import SMALL, write_random_embedder
    from vectormill.models.registry import DEFAULT_MODEL, Registry

    tokenizer = Registry({}).card(DEFAULT_MODEL, weights=True).path
    return DemoModel(
        RANDOM_EMBEDDER,
        "no other is available",
        "This package includes no model with several outputs: the weights are small and random in the layout of "
        "bge-m3, and what is found is meaningless. To use BAAI/bge-m3, pass its name or directory to --model.",
        write_random_embedder(SMALL, tokenizer, directory / RANDOM_EMBEDDER),
    )


def choose_weights(demo: TaskDemo, model: str | None, settings: "Settings", directory: Path) -> DemoModel:
    """Return the model of a demo. Raise UnknownModel, ModelError or InvalidOption before anything is started.

    `model` is a name or a directory. With None the demo chooses, and may write a model into `directory`.
    """
    from vectormill.models.registry import EncodingOptions, Registry, make_spec

    weights = demo.choose_weights(directory) if model is None else find_weights(model, settings)
    if weights.model is not None:
        card = Registry(list_models(settings, weights)).card(weights.model)
        own = {name: value for name, value in demo.options.items() if name != "collection"}
        make_spec(card, EncodingOptions(task=demo.task, **own))
    return weights


def find_weights(model: str, settings: "Settings") -> DemoModel:
    """Return a registered model, or a model in a directory, which is named after the directory."""
    from vectormill.models.registry import open_registry

    path = Path(model).expanduser()
    if model in open_registry(settings).names() or not path.is_dir():
        return DemoModel(model, "requested", f"The weights are those of {model}.")
    name = re.sub(r"[^\w.-]+", "-", path.resolve().name)
    return DemoModel(name, "requested", f"The weights are those in {path.resolve()}.", path.resolve())


def find_remote(model: str | None) -> DemoModel:
    """Return a model of a running service.

    Raise InvalidOption for a directory, which the service cannot read.
    """
    if model is None:
        return DEFAULT
    if Path(model).is_dir():
        raise InvalidOption(
            "With --api-url, --model must be a model that is registered with that service, not a directory."
        )
    return DemoModel(model, "requested", f"The weights are those of {model}.")


def list_models(settings: "Settings", weights: DemoModel) -> "dict[str, ModelEntry]":
    """Return the registered models and this one."""
    from vectormill.models.registry import name_added, read_added
    from vectormill.settings import ModelEntry

    own = {} if weights.path is None else {str(weights.model): ModelEntry(path=str(weights.path))}
    return read_added(name_added(settings)) | settings.models | own


def register(settings: "Settings", weights: DemoModel) -> dict[str, str]:
    """Return the environment variables that register the model; none if it is registered already."""
    if weights.path is None:
        return {}
    from vectormill.settings import PREFIX

    models = list_models(settings, weights)
    return {f"{PREFIX}MODELS": json.dumps({name: entry.options for name, entry in models.items()})}
