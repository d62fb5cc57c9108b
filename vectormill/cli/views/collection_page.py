"""CollectionPage: a collection, and a check of one, for a person, from the API's own answer. Prints on stdout."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vectormill.cli.views.listing import REPORT_WIDTH, print_report
from vectormill.collections.collection import RECORDS, SCORES, VECTORS

BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
# The largest unit of which there are two at the least.
TIME_UNITS: Final = (("days", 86_400), ("h", 3600), ("min", 60))
STATE_STYLES: Final = {
    "live": "bold green",
    "ready": "green",
    "completed": "green",
    "building": "yellow",
    "queued": "yellow",
    "running": "yellow",
    "held": "bold yellow",
    "completed_with_errors": "yellow",
    "failed": "bold red",
    "invalid": "bold red",
    "retired": "dim",
    "cancelled": "dim",
    "skipped": "dim",
}


def describe_bytes(num_bytes: float) -> str:
    """Format a number of bytes, such as "1.5 GiB"."""
    unit = BYTE_UNITS[0]
    for unit in BYTE_UNITS:
        if num_bytes < 1024 or unit == BYTE_UNITS[-1]:
            break
        num_bytes /= 1024
    return f"{num_bytes:,.0f} {unit}" if unit == "B" or num_bytes >= 100 else f"{num_bytes:,.1f} {unit}"


def describe_age(seconds: float | None) -> str:
    """Format an age, such as "3 h ago"; "never" for None."""
    if seconds is None:
        return "never"
    for unit, length in TIME_UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:,.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


def print_page(collection: Mapping[str, Any]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=REPORT_WIDTH)
    console.print(Group(*_page(collection)))


def _page(collection: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield Text.assemble("\n", (collection["name"], "bold"), ("  " + _headline(collection), "dim"), "\n")
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    for name, value in _facts(collection):
        facts.add_row(name, value)
    yield facts
    yield from _section("generations", _generation_columns(), _generation_rows(collection["generations"]))
    indexes = [
        (
            index["name"],
            _state(index["state"]),
            describe_bytes(index["num_bytes"]),
            index["definition"].partition(" USING ")[2],
        )
        for generation in collection["generations"]
        for index in generation["indexes"]
    ]
    yield from _section("indexes", ("name", "state", "size", "on"), indexes)
    jobs = [
        (job["id"], _state(job["state"]), f"{job['num_done'] + job['num_failed']:,} of {job['num_items']:,}")
        for job in collection["open_jobs"]
    ]
    yield from _section("jobs that write into it", ("id", "state", "items"), jobs)
    schedules = [
        (
            each["name"],
            each["cron"],
            each["timezone"],
            "paused" if each["is_paused"] else _moment(each["next_due_at"]),
        )
        for each in collection["schedules"]
    ]
    yield from _section("schedules", ("name", "cron", "timezone", "next due"), schedules)
    yield from _section(
        "last runs", ("id", "kind", "state", "seen", "failed", "ended"), _run_rows(collection["runs"])
    )


def _headline(collection: Mapping[str, Any]) -> str:
    vector_type = collection["options"].get("vector_type") or "float16"
    told = f", {vector_type}" if find_kind(collection) == VECTORS else ""
    return describe_results(collection) + told


def find_kind(collection: Mapping[str, Any]) -> str:
    """Return the kind of the collection; an API of a release without kinds has vectors only."""
    kind: str = collection.get("kind", VECTORS)
    return kind


def describe_results(collection: Mapping[str, Any]) -> str:
    """Describe what a collection holds, such as "default, 384 dimensions" or "reranker, scores of no, yes"."""
    kind, model, options = find_kind(collection), collection["model"], collection["options"]
    if kind == SCORES:
        labels = options.get("labels", ())
        return f"{model}, scores" + (f" of {', '.join(labels)}" if len(labels) > 1 else "")
    if kind == RECORDS:
        return f"{model}, records of {', '.join(json.loads(options['extract_schema']))}"
    return f"{model}, {collection['dimensions']} dimensions"


def _facts(collection: Mapping[str, Any]) -> Iterator[tuple[str, RenderableType]]:
    exact = collection["exact_rows"]
    yield "rows", Text(f"{exact:,}" if exact is not None else f"about {collection['num_rows']:,}")
    yield "on disk", Text(_describe_disk(collection))
    yield "index", Text(f"policy {collection['index_policy']}; {_describe_index(collection)}")
    yield "coverage", _describe_coverage(collection["coverage"])
    yield "staleness", Text(_describe_staleness(collection["staleness"]))
    texts = f"kept, searched as {collection['language']}" if collection["keep_text"] else "not kept"
    yield "texts", Text(texts)
    if collection["filters"]:
        yield "filters", Text(", ".join(_name_filter(each) for each in collection["filters"]))
    source = collection["source"]
    yield "source", Text(_describe_source(source) if source else "none: rows come from jobs and puts")
    yield "made", Text(_moment(collection["created_at"]))


def _describe_disk(collection: Mapping[str, Any]) -> str:
    live = next(each for each in collection["generations"] if each["state"] == "live")
    parts = (("vectors", "table_bytes"), ("indexes", "index_bytes"), ("attributes", "attribute_bytes"))
    told = ", ".join(f"{name} {describe_bytes(live[field])}" for name, field in parts)
    return f"{describe_bytes(collection['num_bytes'])} (live: {told})"


def _describe_index(collection: Mapping[str, Any]) -> str:
    live = next(each for each in collection["generations"] if each["state"] == "live")
    found = [index for index in live["indexes"] if index["method"] in ("hnsw", "ivfflat")]
    if not found:
        return "none, so a search reads every row"
    return ", ".join(f"{index['method']} {index['state']}" for index in found)


def _describe_coverage(coverage: Mapping[str, Any] | None) -> Text:
    if coverage is None:
        return Text("unknown: no re-index has ended")
    text = Text(f"{coverage['share']:.2%} of {coverage['num_seen']:,} rows of the source")
    if coverage["num_failed"]:
        keys = ", ".join(coverage["failed_keys"][:5])
        text.append(f"; {coverage['num_failed']:,} failed: {keys}", style="yellow")
    return text


def _describe_staleness(staleness: Mapping[str, Any]) -> str:
    told = f"re-indexed {describe_age(staleness['stale_seconds'])}"
    if staleness["num_waiting_changes"]:
        told += f", {staleness['num_waiting_changes']:,} changes wait since {_moment(staleness['oldest_change_at'])}"
    return told


def _name_filter(entry: Any) -> str:
    return str(entry.get("field", entry)) if isinstance(entry, Mapping) else str(entry)


def _describe_source(source: Mapping[str, Any]) -> str:
    options = ", ".join(f"{name}={value}" for name, value in source["options"].items())
    return f"{source['kind']}: {options}" if options else source["kind"]


def _generation_columns() -> tuple[str, ...]:
    return ("id", "state", "model", "fingerprint", "rows", "vectors", "indexes", "attributes", "live since")


def _generation_rows(generations: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (
            each["id"],
            _state(each["state"]),
            each["model"],
            each["fingerprint"],
            f"{each['num_rows']:,}",
            describe_bytes(each["table_bytes"]),
            describe_bytes(each["index_bytes"]),
            describe_bytes(each["attribute_bytes"]),
            _moment(each["live_at"]),
        )
        for each in generations
    ]


def _run_rows(runs: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (
            run["id"],
            run["kind"],
            _state(
                run["state"]
                if run["phase"] is None or run["finished_at"]
                else f"{run['state']} ({run['phase']})"
            ),
            f"{run['num_seen']:,}",
            f"{run['num_failed']:,}",
            _moment(run["finished_at"]),
        )
        for run in runs
    ]


def _section(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[RenderableType]:
    if not rows:
        return
    yield Text(f"\n{title}", style="bold")
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    yield table


def _state(state: str) -> Text:
    return Text(state, style=STATE_STYLES.get(state.partition(" ")[0], ""))


def _moment(moment: str | None) -> str:
    return datetime.fromisoformat(moment).strftime("%Y-%m-%d %H:%M UTC") if moment else ""


def print_check(collection: str, report: Mapping[str, Any]) -> None:
    print_report(
        f"Check of {collection}, generation {report['generation']}",
        ("looked at", "found", ""),
        list(_describe(report)),
    )
    for problem in report["problems"]:
        typer.echo(f"Wrong: {problem}")
    for sentence in report["unchecked"]:
        typer.echo(f"Not checked: {sentence}")
    if report["is_good"]:
        typer.echo("Nothing is wrong.")


def _describe(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    yield from _describe_results(report)
    recall = report["recall"]
    if recall is not None:
        yield (
            f"recall@{recall['limit']}",
            f"{recall['value']:.4f}",
            f"{recall['index']}, {recall['num_queries']} queries against an exact search",
        )
    texts = report.get("texts")
    if texts and texts["num_compared"]:
        agreement = f"agree to {texts['smallest']:.5f} at the worst, {texts['mean']:.5f} in the mean"
        yield "texts encoded again", f"{texts['num_compared']:,}", f"{agreement}; {texts['reason']}"
    hashes = report["hashes"]
    if hashes["num_compared"]:
        yield "hashes of kept texts", f"{hashes['num_compared']:,}", f"{hashes['num_differing']:,} differ"
    strays = report["strays"]
    num_strays = strays["num_attributes_without_row"] + strays["num_rows_of_deleted_keys"]
    yield "strays", f"{num_strays:,}", f"the view reads {strays['view_reads']}"


def _describe_results(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the lines on results, for whichever kind the collection has."""
    if vectors := report.get("vectors"):
        num_broken = vectors["num_not_finite"] + vectors["num_zero"] + vectors["num_odd_norms"]
        norms = ""
        if vectors["smallest_norm"] is not None:
            norms = f"lengths from {vectors['smallest_norm']:.4f} to {vectors['largest_norm']:.4f}"
        yield "vectors", f"{vectors['num_rows']:,} rows, {num_broken:,} unsound", norms
    if scores := report.get("scores"):
        scale = ""
        if scores["smallest"] is not None:
            scale = f"from {scores['smallest']:.4f} to {scores['largest']:.4f}"
        yield "scores", f"{scores['num_rows']:,} rows, {scores['num_broken']:,} unsound", scale
    if records := report.get("records"):
        found = f"{records['num_rows']:,} rows, {records['num_broken']:,} unsound"
        yield "records", found, f"nothing was found in {records['num_empty']:,}"
