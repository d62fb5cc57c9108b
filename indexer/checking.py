"""Checking: verify the content of a generation, by a check of the live one or the canary of a new one.

Both look for broken vectors, scores and records, encode a sample of texts again, and measure the recall of
the index. A check also looks for orphaned rows and tables, and changes nothing but the run's report. A canary
also verifies that all rows of the source and all later puts are present, and decides whether the generation
may go live.
"""

import math
import time
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from indexer.context import RunContext, Wait
from vectormill.collections.collection import BUILDING, LIVE, Generation
from vectormill.collections.collections import (
    add_to_report,
    find_generation,
    find_generation_by_id,
    find_in_state,
)
from vectormill.collections.generations import list_lagging_twins
from vectormill.domain.errors import CanaryFailed, EncodingTimeout
from vectormill.domain.task import VECTORS
from vectormill.jobs.dual_writes import add_missing_twins
from vectormill.runs.checks import (
    HAS_BEEN_PUT,
    LIST_WRITERS,
    MissingRows,
    count_failures,
    count_open_jobs,
    find_inconsistencies,
    find_missing,
    has_rows,
    measure_recall,
    name_keys,
    scan_results,
)
from vectormill.runs.run import (
    CANARY_SAMPLE,
    CHECKING,
    DEFAULT_SAMPLE,
    LEAST_COSINE,
    LEAST_RECALL,
    MOST_FAILED_SHARE,
)
from vectormill.runs.samples import compare_sample, sample_kept_texts

# The number of texts hashed at once; long ones take up some tens of megabytes.
HASHED_TEXTS: Final = 1000
# How long to wait for twins of the last puts; a worker may have to load the new model first.
TWINS_PATIENCE_SECONDS: Final = 600.0
_PAUSE_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings of a check: figures by name, and a sentence for each problem and each omitted check."""

    found: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def look_at_results(context: RunContext, generation: Generation, findings: Findings) -> None:
    scan = scan_results(context.engine, generation, check=context.check)
    findings.found[generation.kind] = scan.found
    findings.problems.extend(scan.list_problems())


def look_at_index(
    context: RunContext, generation: Generation, findings: Findings, least: float = LEAST_RECALL
) -> None:
    if generation.kind != VECTORS:
        findings.found["recall"] = None
        findings.unchecked.append(f"Recall: {generation.kind} have no vector index.")
        return
    recall = measure_recall(context.engine, generation, check=context.check)
    findings.found["recall"] = recall.to_json() if recall is not None else None
    if recall is None:
        findings.unchecked.append("Recall: there is no index on the vectors, or there are too few rows.")
    elif recall.value < least:
        advice = f"`vectormill collections index {generation.collection} --rebuild` rebuilds it"
        if generation.state == BUILDING:  # that command would rebuild the live generation's
            accepted = math.floor(100 * recall.value) / 100
            advice = f"repeat the run with `--least-recall {accepted:g}` to accept it"
        findings.problems.append(
            f"The index {recall.index} finds {recall.value:.1%} of the {recall.limit} nearest rows, less "
            f"than {least:.1%}: {advice}."
        )


def look_at_texts(
    context: RunContext, generation: Generation, findings: Findings, size: int, least: float | None = None
) -> None:
    """Encode up to `size` texts of the generation again and compare the results with the stored ones.

    `least` replaces the usual threshold for the cosine of float vectors. Raise EncodingTimeout.
    """
    if size <= 0:
        findings.unchecked.append("Texts encoded again: none were requested.")
        findings.found["texts"] = {"num_compared": 0, "reason": "the run was requested with a sample of 0"}
        return
    agreement = compare_sample(context.engine, context.settings, generation, size, check=context.check)
    findings.found["texts"] = agreement.to_json()
    if agreement.smallest is None:
        findings.unchecked.append(f"Texts encoded again: {agreement.reason}.")
        return
    is_float = generation.kind == VECTORS and generation.spec.kept_type.is_float
    wanted = least if is_float and least is not None else agreement.least
    if not agreement.is_good or agreement.smallest < wanted:
        keys = agreement.differing_keys
        differing = f"; {agreement.num_differing:,} differ ({name_keys(keys)})" if keys else ""
        findings.problems.append(
            f"Of {agreement.num_compared:,} texts that were encoded again, the worst agrees to "
            f"{agreement.smallest:.5f}, less than {wanted:g}{differing}."
        )


def check_collection(context: RunContext) -> None:
    """Check the live generation and write the findings to the run's report.

    `problems` and `unchecked` are sentences about faults and omitted checks. The run's option `sample` is the
    number of texts to encode again, 0 for none.
    """
    with context.engine.connect() as connection:
        generation = find_generation(connection, context.run.collection)
    findings = Findings({"generation": generation.id})
    for look in (look_at_results, look_at_strays, look_at_hashes, look_at_index):
        context.check()
        look(context, generation, findings)
    context.check()
    try:
        look_at_texts(context, generation, findings, int(context.run.options.get("sample", DEFAULT_SAMPLE)))
    except EncodingTimeout as error:
        findings.unchecked.append(f"Texts encoded again: {error}")
    told = {"problems": findings.problems, "unchecked": findings.unchecked, "is_good": not findings.problems}
    context.report(CHECKING, findings.found | told)


def look_at_strays(context: RunContext, generation: Generation, findings: Findings) -> None:
    with context.engine.connect() as connection:
        strays = find_inconsistencies(connection, generation)
    findings.found["strays"] = {
        "num_attributes_without_row": strays.num_attributes,
        "num_rows_of_deleted_keys": strays.num_deleted_keys,
        "missing_tables": strays.missing_tables,
        "tables_of_no_collection": strays.left_tables,
        "view_reads": strays.view_reads,
    }
    if strays.num_attributes:
        findings.problems.append(
            f"{strays.num_attributes:,} attributes have no row ({name_keys(strays.attribute_keys)})."
        )
    if strays.num_deleted_keys:
        findings.problems.append(
            f"{strays.num_deleted_keys:,} deleted keys still have rows ({name_keys(strays.deleted_keys)})."
        )
    if strays.missing_tables:
        findings.problems.append(
            f"Tables of its generations are missing: {', '.join(strays.missing_tables)}."
        )
    if strays.left_tables:
        findings.problems.append(
            f"Tables that belong to no collection: {', '.join(strays.left_tables)}; the scheduler will "
            "drop them."
        )
    if generation.table_name not in strays.view_reads.split(", "):
        findings.problems.append(
            f"The view {generation.collection} reads {strays.view_reads or 'no table of Vectormill'} "
            f"instead of the live generation {generation.table_name}."
        )


def look_at_hashes(context: RunContext, generation: Generation, findings: Findings) -> None:
    with context.engine.connect() as connection:
        sample = sample_kept_texts(connection, generation, HASHED_TEXTS)
    others = [item.key for item, known in sample if item.content_hash() != known]
    findings.found["hashes"] = {
        "num_compared": len(sample),
        "num_differing": len(others),
        "differing_keys": others[:20],
    }
    if others:
        findings.problems.append(
            f"{len(others):,} stored texts do not match their {generation.kind} ({name_keys(others)})."
        )
    if not sample:
        findings.unchecked.append("Hashes of texts: the collection stores none.")


def check_generation(context: RunContext, wait: Wait = time.sleep) -> None:
    """Run the canary on the generation that the run has built; do nothing if it is already live.

    Options of the run: `least_recall`, `least_cosine`, `canary_sample` (number of texts to encode again, 0
    for none) and `most_failed_share`. Raise CanaryFailed with all reasons; the report has the measurements in
    any case.
    """
    with context.engine.connect() as connection:
        building = find_generation_by_id(connection, context.run.generation_id or 0)
        live = find_in_state(connection, context.run.collection, LIVE)
    if building is None or building.state != BUILDING or live is None:
        return
    findings = Findings()
    await_twins(context, building, wait)
    context.check()
    look_at_coverage(context, building, live, findings)
    if not findings.problems:  # with rows missing, the other measurements would mean little
        look_at_results(context, building, findings)
        context.check()
        look_at_index(context, building, findings, _option(context, "least_recall", LEAST_RECALL))
        context.check()
        size = int(_option(context, "canary_sample", CANARY_SAMPLE))
        look_at_texts(context, building, findings, size, _option(context, "least_cosine", LEAST_COSINE))
    reasons = findings.problems
    report = {**findings.found, "reasons": reasons, "is_good": not reasons}
    context.report(CHECKING, report)
    with context.engine.begin() as connection:
        add_to_report(connection, building.id, "canary", report)
    if reasons:
        raise CanaryFailed(
            f"The new generation {building.id} of {building.collection!r} was not made live: "
            f"{' '.join(reasons)} The live one is unchanged. Inspect vectormill.{building.table_name}, or "
            "start the run again."
        )


def await_twins(context: RunContext, building: Generation, wait: Wait) -> None:
    """Wait until all puts acknowledged so far are in the new generation too.

    Raise CanaryFailed after a timeout. Later puts are not awaited, because under sustained puts there would
    always be one.
    """
    add_missing_twins(context.engine, building)
    until = time.monotonic() + TWINS_PATIENCE_SECONDS
    awaited: set[UUID] | None = None
    while True:
        context.check()
        with context.engine.connect() as connection:
            lagging = list_lagging_twins(connection, building.id)
            num_open = count_open_jobs(connection, building.id)
        awaited = lagging if awaited is None else awaited & lagging
        num_lagging = len(awaited)
        if not num_lagging + num_open:
            return
        if time.monotonic() > until:
            raise CanaryFailed(
                f"{num_lagging + num_open} jobs are still waiting to be encoded by {building.spec.model} "
                f"for the new generation of {building.collection!r}; check that a worker for it is "
                "running and that no job is paused."
            )
        wait(_PAUSE_SECONDS)


def _option(context: RunContext, name: str, default: float) -> float:
    return float(context.run.options.get(name, default))


def look_at_coverage(context: RunContext, building: Generation, live: Generation, findings: Findings) -> None:
    run, reasons = context.run, findings.problems
    seq = run.seq or 0
    seen = f"run_{run.id.hex}_seen"
    with context.engine.connect() as connection:
        writers = list(connection.execute(LIST_WRITERS, {"generation_id": building.id}).scalars())
        failures = count_failures(connection, writers)
        if run.counts.num_seen and not has_rows(connection, seen):
            reasons.append("Postgres was restarted and lost what the run had read; start the run again.")
            return
        missing = MissingRows(0, [])
        if run.counts.num_seen:
            missing = find_missing(connection, building, seen, seq, writers)
        puts = find_missing(connection, building, live.table_name, seq, writers, HAS_BEEN_PUT)
    findings.found["coverage"] = {
        "num_seen": run.counts.num_seen,
        "num_missing": missing.number,
        "missing_keys": missing.keys,
        "num_missing_puts": puts.number,
        "missing_puts": puts.keys,
        "num_failed": failures.number,
        "num_failed_unexpectedly": failures.num_unexpected,
        "failed_items": [list(item) for item in failures.items],
    }
    if not run.options.get("is_complete", True):
        reasons.append("The source was not sent completely, so rows that it did not include would be lost.")
    if missing.number:
        reasons.append(
            f"{missing.number:,} rows of the source are missing, among them {name_keys(missing.keys)}."
        )
    if puts.number:
        reasons.append(
            f"{puts.number:,} items put since then are missing, among them {name_keys(puts.keys)}."
        )
    allowed = _option(context, "most_failed_share", MOST_FAILED_SHARE) * max(run.counts.num_seen, 1)
    if failures.num_unexpected > allowed:
        failed = ", ".join(f"{key!r} ({code})" for key, code in failures.items[:3])
        reasons.append(f"{failures.num_unexpected:,} items could not be encoded, among them {failed}.")
