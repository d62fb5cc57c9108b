"""Commands that create, show, change, export, check and delete collections, and their output."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import typer

from vectormill.cli.command import Client, Names, command
from vectormill.cli.exits import ITEMS_FAILED, JOB_NOT_COMPLETED, exit_code_of_job
from vectormill.cli.files import name_output, tell_written
from vectormill.cli.printing import (
    Column,
    Outcome,
    follow,
    listing,
    make_report_console,
    print_json,
    print_report,
    tabulate,
    tell,
)
from vectormill.cli.runs import describe_outcome, look_at_indexing, look_at_run
from vectormill.collections.sizing import describe_bytes
from vectormill.domain.encoding import EncodingOptions
from vectormill.domain.errors import InvalidOption
from vectormill.domain.options import find_given
from vectormill.domain.task import RECORDS, SCORES, VECTORS
from vectormill.domain.vector_type import DEFAULT_IN_COLLECTION, DOT
from vectormill.files.formats import OUTPUT_FORMATS, RowsName, describe_outputs
from vectormill.files.outputs import check_outputs, choose_format

if TYPE_CHECKING:
    from rich.text import Text


app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: vectormill collections show docs",
    help="Create, show, export, check and delete collections.",
)

# From the largest unit down: an age is shown in the first unit of which it has at least two.
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

Collection = Mapping[str, Any]
Policy = Literal["auto", "hnsw", "none"]


@command(
    app,
    "vectormill collections create docs",
    "vectormill collections create docs --keep-text --language english --vector-type float32",
    view=lambda made: tell(f"Created collection {made['name']}: {describe_results(made)}."),
)
def create(
    client: Client,
    collection: str,
    *,
    keep_text: bool | None = None,
    language: str | None = None,
    model: str | None = None,
    options: EncodingOptions,
    index: Policy | None = None,
    multi_vector_codes: int | None = None,
) -> Collection:
    """Create a collection before its first job, with all options that decide its results.

    Args:
        index: Policy for building an HNSW index.  [default: auto]
        multi_vector_codes (BITS, 0 or 2): Keep multi-vectors as residual codes of 2 bits a dimension.
    """
    return client.create_collection(
        collection,
        model=model,
        options=find_given(options),
        keep_text=keep_text,
        language=language,
        index_policy=index,
        index_options=None if multi_vector_codes is None else {"multi_vector_codes": multi_vector_codes},
    )


@command(
    app,
    "vectormill collections list --json | jq -r .name",
    name="list",
    view=listing(
        "name",
        "kind",
        "model",
        ("rows", lambda collection: f"{collection['num_rows']:,}"),
        ("size", lambda collection: describe_bytes(collection["num_bytes"])),
        ("generations", "num_generations"),
        ("last re-index", lambda collection: describe_age(collection["stale_seconds"])),
    ),
)
def list_all(client: Client) -> Iterator[Collection]:
    """List collections by name, with their approximate numbers of rows."""
    return client.collections()


def show_collection(collection: Collection) -> None:
    from rich.table import Table
    from rich.text import Text

    console = make_report_console()
    vector_type = collection["options"].get("vector_type") or DEFAULT_IN_COLLECTION.name
    told = f", {vector_type}" if collection["kind"] == VECTORS else ""
    headline = (f"  {describe_results(collection)}{told}", "dim")
    console.print(Text.assemble("\n", (collection["name"], "bold"), headline, "\n"))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    for name, value in describe_facts(collection):
        facts.add_row(name, value)
    console.print(facts)
    for title, find, columns in SECTIONS:
        if records := list(find(collection)):
            print_report(title, *tabulate(columns, records))


@command(
    app,
    "vectormill collections show docs",
    "vectormill collections show docs --exact",
    view=show_collection,
)
def show(client: Client, collection: str, *, exact: bool = False) -> Collection:
    """Show a collection: rows, generations, indexes, coverage, staleness, and work in progress.

    Args:
        exact: Count the rows one by one, instead of Postgres' estimate.
    """
    return client.collection(collection, exact=exact)


@command(app, "vectormill collections change docs --keep-text --language english")
def change(
    client: Client, collection: str, *, keep_text: bool | None = None, language: str | None = None
) -> str:
    """Change whether texts are kept from now on, or the language that they are searched in."""
    if keep_text is None and language is None:
        raise typer.BadParameter("Give at least one of --keep-text, --no-keep-text and --language.")
    changed = client.change_collection(collection, keep_text=keep_text, language=language)
    texts = "keeps" if changed["keep_text"] else "does not keep"
    return f"Collection {collection} {texts} texts, and searches them as {changed['language']}."


@command(
    app,
    "vectormill collections export docs -o docs.parquet",
    "vectormill collections export docs -o - --include metadata,text | jq .key",
)
def export(
    client: Client,
    collection: str,
    *,
    out: Path,
    format: RowsName | None = None,
    include: Names | None = None,
    after: str | None = None,
) -> str | None:
    """Write a collection's rows, ordered by key, to a file, which appears whole or not at all.

    Args:
        out (--out -o, OUT): {rows}
        include (PART): A part to write: vector (score or output, by the kind of the collection), metadata or text. By
            default the first two.
        after (KEY): Write only rows after this key, to continue an export.
    """
    path = name_output(out)
    kind = choose_format(path, format)
    if not OUTPUT_FORMATS[kind].has_keys:
        raise InvalidOption(
            f"Collections can be exported as {describe_outputs(of_rows=True)}; {kind} has no keys."
        )
    check_outputs([path])
    client.export_collection(collection, path, kind, include=include, after=after)
    return tell_written(path)


@command(app, "vectormill collections delete docs", "vectormill collections delete docs --force --yes")
def delete(client: Client, collection: str, *, force: bool = False, yes: bool = False) -> str:
    """Delete a collection with all its rows. Its jobs stay, without results.

    Args:
        force: Cancel the jobs and runs that work on it first.
    """
    if not yes and sys.stdin.isatty():
        found = client.collection(collection)
        typer.confirm(f"Delete {collection} with about {found['num_rows']:,} rows?", abort=True, err=True)
    client.delete_collection(collection, force=force)
    return f"Deleted collection {collection}."


def show_check(run: Mapping[str, Any]) -> None:
    if run["state"] == "completed":
        print_check(run["collection"], run["report"]["checking"])
    else:
        tell(f"The check ended as {run['state']}: {run['error']}")


@command(
    app,
    "vectormill collections check docs",
    "vectormill collections check docs --sample 1000",
    note="Exit codes: 0 no problems, 1 problems found, 3 service unavailable, 4 the check failed or was cancelled.",
    view=show_check,
)
def check(client: Client, collection: str, *, sample: int = 200) -> Outcome:
    """Check a collection: vectors, index, texts encoded again, and orphaned rows.

    Args:
        sample (N, 0 to 10000): Encode N of its texts again and compare.
    """
    run = follow(client.wait_run, client.check_collection(collection, sample=sample)["id"], look_at_run)
    if run["state"] != "completed":
        return Outcome(run, JOB_NOT_COMPLETED)
    return Outcome(run, 0 if run["report"]["checking"]["is_good"] else ITEMS_FAILED)


def show_rollback(answer: Mapping[str, Any]) -> None:
    live, retired = answer["live"], answer["retired"]
    typer.echo(
        f"{answer['collection']} uses generation {live['id']} again "
        f"({live['options']['model']}, {live['fingerprint']}); generation {retired['id']} "
        f"({retired['options']['model']}, {retired['fingerprint']}) is retired."
    )
    newer, missing = answer["num_newer_rows"], answer["num_missing_rows"]
    if newer != 0:
        typer.echo(f"Run {answer['run_id']} encodes the rows put since it was last live.")
    if missing:
        said = (
            "1 of these rows has no stored text and is"
            if missing == 1
            else f"{missing:,} of these rows have no stored text and are"
        )
        typer.echo(f"{said} missing unless a job still has the text.")


@command(app, "vectormill collections rollback docs", view=show_rollback)
def rollback(client: Client, collection: str, *, yes: bool = False) -> Mapping[str, Any]:
    """Make the previous generation live again; a run encodes the rows put since the swap.

    Where texts are not kept, it asks before it leaves those rows out.

    Args:
        yes: Do not ask. Rows put since then whose texts were not kept are left out.
    """
    from vectormill.problems import ApiError

    try:
        return client.rollback_collection(collection, allow_missing=yes)
    except ApiError as error:
        if error.title != "Rows missing":
            raise
        if not sys.stdin.isatty():
            raise ApiError(
                error.status, error.title, f"{error} Repeat with --yes to roll back anyway."
            ) from error
        typer.confirm(f"{error} Roll back?", abort=True, err=True)
        return client.rollback_collection(collection, allow_missing=True)


@command(
    app,
    "vectormill collections index docs",
    "vectormill collections index docs --on lang --on year --wait",
    "vectormill collections index docs --policy hnsw --m 24 --ef-construction 128 --wait",
)
def index(
    client: Client,
    collection: str,
    *,
    policy: Policy | None = None,
    m: int | None = None,
    ef_construction: int | None = None,
    workers: int | None = None,
    memory_mib: int | None = None,
    on: Names | None = None,
    multi_vector_codes: int | None = None,
    bm25: bool | None = None,
    rebuild: bool = False,
    drop: bool = False,
    wait: bool = False,
    json: bool = False,
) -> None:
    """Show the indexes of a collection, or build, rebuild or drop them while searches go on.

    Args:
        policy: Build a vector index from 10,000 rows on, always, or never.
        m (N, 2 to 100): HNSW: neighbours of each row in the graph.
        ef_construction (N, 4 to 1000): HNSW: candidates examined for each row while building.
        workers (N, 0 to 31): Parallel processes for a build.
        memory_mib (MIB, from 1): Memory for a build (Postgres's maintenance_work_mem).
        on (FIELD): Index a metadata field for filters, such as author or author.name; * indexes all fields.
            Replaces the fields that were set before.
        multi_vector_codes (BITS, 0 or 2): Turn multi-vectors into residual codes of 2 bits a dimension; 0 keeps those
            of new rows as halves.
        bm25: Rank words by BM25 in searches, if Postgres has the extension pg_textsearch, or no longer.
        rebuild: Rebuild the vector index even if it is usable.
        drop: Drop the vector index and set the policy to none.
    """
    wishes = (policy, m, ef_construction, workers, memory_mib, on, multi_vector_codes, bm25)
    if all(wish is None for wish in wishes) and not (rebuild or drop or wait):
        (print_json if json else show_indexes)(client.index(collection))
        return
    run: Mapping[str, Any] = client.set_index(
        collection,
        policy=policy,
        m=m,
        ef_construction=ef_construction,
        workers=workers,
        memory_bytes=None if memory_mib is None else memory_mib << 20,
        filters=on,
        multi_vector_codes=multi_vector_codes,
        bm25=bm25,
        rebuild=rebuild,
        drop=drop,
    )
    if wait:
        run = follow(client.wait_run, run["id"], look_at_indexing)
    if json:
        print_json(run)
    elif wait:
        typer.echo("\n".join([f"Run {run['id']} is {run['state']}.", *describe_outcome(run)]))
    else:
        typer.echo(f"Run {run['id']} is {run['state']}; see `vectormill runs show {run['id']}`.")
    if wait:
        raise typer.Exit(exit_code_of_job(run["state"]))


list_indexes = listing(
    ("index", "name"),
    "method",
    ("state", lambda index: "ready" if index["is_valid"] else "not ready"),
    ("size", lambda index: f"{index['num_bytes'] / (1 << 20):,.1f} MiB"),
    ("last used", lambda index: (index["last_used_at"] or "never")[:19]),
)


def show_indexes(found: Mapping[str, Any]) -> None:
    list_indexes(found["indexes"])
    typer.echo(f"Policy {found['policy']}, {found['num_rows']:,} rows.")
    for plan in (found["plan"], found["sparse_plan"]):
        for reason in () if plan is None else plan["reasons"]:
            typer.echo(reason)
    if (num := found["built"].get("sparse", {}).get("num_unindexed")) is not None:
        typer.echo(f"{num:,} rows had too many sparse weights for the index when it was built.")
    if progress := found["progress"]:
        share = "" if progress["share"] is None else f", {progress['share']:.0%}"
        typer.echo(f"Build in progress: {progress['phase']}{share}.")


@command(app, "vectormill collections discard docs 12")
def discard(client: Client, collection: str, generation_id: int) -> None:
    """Discard a generation that is being built or is retired; its tables are dropped soon.

    Args:
        generation_id (GENERATION): The generation's number, as shown by `collections show`.
    """
    client.discard_generation(collection, generation_id)
    typer.echo(
        f"Generation {generation_id} of {collection} is discarded; its tables are dropped within seconds."
    )


def describe_age(seconds: float | None) -> str:
    """Format an age, such as "3 h ago"; "never" for None."""
    if seconds is None:
        return "never"
    for unit, length in TIME_UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:,.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


def state_of(record: Mapping[str, Any]) -> "Text":
    """Return the state of a record in its colour, with the phase of a run."""
    from rich.text import Text

    state = record["state"]
    told = f"{state} ({record['phase']})" if record.get("phase") else state
    return Text(told, style=STATE_STYLES.get(state, ""))


def number(field: str) -> tuple[str, Callable[[Any], str]]:
    return field.removeprefix("num_"), lambda record: f"{record[field]:,}"


def size(title: str, field: str) -> tuple[str, Callable[[Any], str]]:
    return title, lambda record: describe_bytes(record[field])


def moment(title: str, field: str) -> tuple[str, Callable[[Any], str]]:
    return title, lambda record: describe_moment(record[field])


STATE: Final = ("state", state_of)
# The tables below the facts of a collection: the title, the records, and the columns as of a listing.
SECTIONS: Final[tuple[tuple[str, Callable[[Collection], Iterable[Mapping[str, Any]]], Sequence[Column]], ...]] = (
    (
        "generations",
        lambda collection: collection["generations"],
        (
            "id", STATE, "model", "fingerprint", number("num_rows"), size("vectors", "table_bytes"),
            size("indexes", "index_bytes"), size("attributes", "attribute_bytes"), moment("live since", "live_at"),
        ),
    ),
    (
        "indexes",
        lambda collection: [index for each in collection["generations"] for index in each["indexes"]],
        ("name", STATE, size("size", "num_bytes"), ("on", lambda index: index["definition"].partition(" USING ")[2])),
    ),
    (
        "jobs that write to it",
        lambda collection: collection["open_jobs"],
        ("id", STATE, ("items", lambda job: f"{job['num_done'] + job['num_failed']:,} of {job['num_items']:,}")),
    ),
    (
        "schedules",
        lambda collection: collection["schedules"],
        (
            "name", "cron", "timezone",
            ("next due", lambda each: "paused" if each["is_paused"] else describe_moment(each["next_due_at"])),
        ),
    ),
    (
        "last runs",
        lambda collection: collection["runs"],
        ("id", "kind", STATE, number("num_seen"), number("num_failed"), moment("ended", "finished_at")),
    ),
)  # fmt: skip


def describe_results(collection: Collection) -> str:
    """Describe a collection's results, such as "default, 384 dimensions" or "reranker, scores of no, yes"."""
    kind, model, options = collection["kind"], collection["model"], collection["options"]
    if kind == SCORES:
        labels = options.get("labels", ())
        return f"{model}, scores" + (f" of {', '.join(labels)}" if len(labels) > 1 else "")
    if kind == RECORDS:
        return f"{model}, records of {', '.join(json.loads(options['extract_schema']))}"
    if not collection["dimensions"]:  # of sparse weights or multi-vectors alone
        return f"{model}, {options['outputs'].replace(',', ', ')}"
    how = ", compared by inner product" if options.get("similarity") == DOT else ""
    return f"{model}, {collection['dimensions']} dimensions{how}"


def describe_facts(collection: Collection) -> "Iterator[tuple[str, Text]]":
    """Yield the facts of a collection, each with its name."""
    from rich.text import Text

    live = next(each for each in collection["generations"] if each["state"] == "live")
    exact = collection["exact_rows"]
    yield "rows", Text(f"{exact:,}" if exact is not None else f"about {collection['num_rows']:,}")
    parts = (("vectors", "table_bytes"), ("indexes", "index_bytes"), ("attributes", "attribute_bytes"))
    told = ", ".join(f"{name} {describe_bytes(live[field])}" for name, field in parts)
    yield "on disk", Text(f"{describe_bytes(collection['num_bytes'])} (live: {told})")
    found = [index for index in live["indexes"] if index["method"] in ("hnsw", "ivfflat")]
    indexes = ", ".join(f"{index['method']} {index['state']}" for index in found)
    indexes = indexes or "none, so a search reads every row"
    yield "index", Text(f"policy {collection['index_policy']}; {indexes}")
    coverage = collection["coverage"]
    if coverage is None:
        text = Text("unknown: no re-index has finished yet")
    else:
        text = Text(f"{coverage['share']:.2%} of {coverage['num_seen']:,} rows of the source")
        if coverage["num_failed"]:
            keys = ", ".join(coverage["failed_keys"][:5])
            text.append(f"; {coverage['num_failed']:,} failed: {keys}", style="yellow")
    yield "coverage", text
    staleness = collection["staleness"]
    told = f"re-indexed {describe_age(staleness['stale_seconds'])}"
    if staleness["num_waiting_changes"]:
        since = describe_moment(staleness["oldest_change_at"])
        told += f", {staleness['num_waiting_changes']:,} changes waiting since {since}"
    yield "staleness", Text(told)
    texts = f"kept, searched as {collection['language']}" if collection["keep_text"] else "not kept"
    yield "texts", Text(texts)
    if collection.get("note"):
        yield "model", Text(collection["note"], style="yellow")
    if collection["filters"]:
        names = (
            each.get("field", each) if isinstance(each, Mapping) else each for each in collection["filters"]
        )
        yield "filters", Text(", ".join(map(str, names)))
    if source := collection["source"]:
        options = ", ".join(f"{name}={value}" for name, value in source["options"].items())
        yield "source", Text(f"{source['kind']}: {options}" if options else source["kind"])
    else:
        yield "source", Text("none: rows come from jobs and puts")
    yield "made", Text(describe_moment(collection["created_at"]))


def describe_moment(moment: str | None) -> str:
    return datetime.fromisoformat(moment).strftime("%Y-%m-%d %H:%M UTC") if moment else ""


def print_check(collection: str, report: Mapping[str, Any]) -> None:
    print_report(
        f"Check of {collection}, generation {report['generation']}",
        ("checked", "found", ""),
        list(describe_check(report)),
    )
    for problem in report["problems"]:
        typer.echo(f"Problem: {problem}")
    for sentence in report["unchecked"]:
        typer.echo(f"Not checked: {sentence}")
    if report["is_good"]:
        typer.echo("No problems found.")


def describe_check(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield what was checked, what was found, and a remark; results by the kind of the collection."""
    if vectors := report.get("vectors"):
        num_broken = vectors["num_not_finite"] + vectors["num_zero"] + vectors["num_odd_norms"]
        norms = ""
        if vectors["smallest_norm"] is not None:
            norms = f"norms from {vectors['smallest_norm']:.4f} to {vectors['largest_norm']:.4f}"
        yield "vectors", f"{vectors['num_rows']:,} rows, {num_broken:,} invalid", norms
    if scores := report.get("scores"):
        scale = ""
        if scores["smallest"] is not None:
            scale = f"from {scores['smallest']:.4f} to {scores['largest']:.4f}"
        yield "scores", f"{scores['num_rows']:,} rows, {scores['num_broken']:,} invalid", scale
    if records := report.get("records"):
        found = f"{records['num_rows']:,} rows, {records['num_broken']:,} invalid"
        yield "records", found, f"nothing found in {records['num_empty']:,}"
    if recall := report["recall"]:
        remark = f"{recall['index']}, {recall['num_queries']} queries against an exact search"
        yield f"recall@{recall['limit']}", f"{recall['value']:.4f}", remark
    texts = report.get("texts")
    if texts and texts["num_compared"]:
        agreement = f"agreement at least {texts['smallest']:.5f}, {texts['mean']:.5f} on average"
        yield "texts encoded again", f"{texts['num_compared']:,}", f"{agreement}; {texts['reason']}"
    hashes = report["hashes"]
    if hashes["num_compared"]:
        yield "hashes of kept texts", f"{hashes['num_compared']:,}", f"{hashes['num_differing']:,} differ"
    strays = report["strays"]
    num_strays = strays["num_attributes_without_row"] + strays["num_rows_of_deleted_keys"]
    yield "strays", f"{num_strays:,}", f"the view reads {strays['view_reads']}"
