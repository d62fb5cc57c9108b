"""The canary: what a new generation has to show before it becomes the live one. It changes nothing but its report.

Every row of the source and every put of the meantime is there; no vector is NaN or zero, no score off its scale; the
index of vectors finds what an exact search finds; and texts that are encoded again come out as they are kept. The first
that is not so ends the run, and the live generation stays.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from uuid import UUID

from indexer.context import RunContext
from indexer.measures import measure_recall, scan_validity, scan_vectors
from indexer.phases.samples import compare_sample
from vectormill.collections.building import follow_live_jobs, keep_canary_report
from vectormill.collections.collection import BUILDING, LIVE, VECTORS, Generation
from vectormill.collections.coverage import (
    Missing,
    count_failures,
    count_open_jobs,
    find_missing_of_source,
    find_missing_puts,
    has_rows,
    list_writers,
)
from vectormill.collections.generations import find_generation_by_id, find_in_state
from vectormill.collections.swaps import list_lagging_twins
from vectormill.domain.encoding import FLOAT16, FLOAT32
from vectormill.domain.errors import CanaryFailed
from vectormill.runs.run import CHECKING

LEAST_RECALL: Final = 0.95
# In 16 bit, also of a text that was encoded in another batch or on another device.
LEAST_COSINE: Final = 0.999
SAMPLE_SIZE: Final = 64
# The share of the source's rows that may fail for a reason that is not their own text's.
MOST_FAILED_SHARE: Final = 0.01
# Twins of puts that came last; a worker of the new model may load it first.
TWINS_PATIENCE_SECONDS: Final = 600.0
_PAUSE_SECONDS: Final = 0.2

Wait = Callable[[float], object]


def check_generation(context: RunContext, wait: Wait = time.sleep) -> None:
    """Look at the generation that the run has built; does nothing for one that is live.

    Options of the run: `least_recall`, `least_cosine`, `canary_sample` (texts that are encoded again, 0 for none) and
    `most_failed_share`. Raise CanaryFailed with every reason; what was measured is in the report either way.
    """
    with context.engine.connect() as connection:
        building = find_generation_by_id(connection, context.run.generation_id or 0)
        live = find_in_state(connection, context.run.collection, LIVE)
    if building is None or building.state != BUILDING or live is None:
        return
    found: dict[str, Any] = {}
    reasons: list[str] = []
    await_twins(context, building, wait)
    for look in (_look_at_coverage, _look_at_results, _look_at_index, _look_at_texts):
        context.check()
        reasons += look(context, building, live, found, wait)
        if reasons and look is _look_at_coverage:
            break  # the rest would only measure what is there
    report = {**found, "reasons": reasons, "is_good": not reasons}
    context.report(CHECKING, report)
    with context.engine.begin() as connection:
        keep_canary_report(connection, building.id, report)
    if reasons:
        raise CanaryFailed(
            f"The new generation {building.id} of {building.collection!r} was not made live: {' '.join(reasons)} "
            f"The live one stays; look at vectormill.{building.table_name}, or run again."
        )


def await_twins(context: RunContext, building: Generation, wait: Wait) -> None:
    """Wait until every put that was acknowledged before is in the new generation too. Raise CanaryFailed.

    Later puts are not waited for: under sustained puts there is always one.
    """
    follow_live_jobs(context.engine, building)
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
                f"{num_lagging + num_open} jobs still wait to be encoded by {building.spec.model} for the new "
                f"generation of {building.collection!r}; check that a worker for it runs and that none is paused."
            )
        wait(_PAUSE_SECONDS)


def _option(context: RunContext, name: str, default: float) -> float:
    options: Mapping[str, Any] = context.run.options
    return float(options.get(name, default))


def _look_at_coverage(
    context: RunContext, building: Generation, live: Generation, found: dict[str, Any], wait: Wait
) -> list[str]:
    run = context.run
    seq = run.seq or 0
    seen = f"run_{run.id.hex}_seen"
    with context.engine.connect() as connection:
        writers = list_writers(connection, building.id)
        failures = count_failures(connection, writers)
        if run.counts.num_seen and not has_rows(connection, seen):
            return ["Postgres was restarted and what the run had read is gone; start it again."]
        missing = Missing(0, [])
        if run.counts.num_seen:
            missing = find_missing_of_source(connection, building, seen, seq, writers)
        puts = find_missing_puts(connection, building, live, seq, writers)
    found["coverage"] = {
        "num_seen": run.counts.num_seen,
        "num_missing": missing.number,
        "missing_keys": missing.keys,
        "num_missing_puts": puts.number,
        "missing_puts": puts.keys,
        "num_failed": failures.number,
        "num_failed_unexpectedly": failures.num_unexpected,
        "failed_items": [list(item) for item in failures.items],
    }
    reasons = []
    if not run.options.get("is_complete", True):
        reasons.append("The source was not sent whole, so the rows that it did not name would be gone.")
    if missing.number:
        reasons.append(f"{missing.number:,} rows of the source are missing, {_name(missing.keys)}.")
    if puts.number:
        reasons.append(f"{puts.number:,} items put meanwhile are missing, {_name(puts.keys)}.")
    allowed = _option(context, "most_failed_share", MOST_FAILED_SHARE) * max(run.counts.num_seen, 1)
    if failures.num_unexpected > allowed:
        failed = ", ".join(f"{key!r} ({code})" for key, code in failures.items[:3])
        reasons.append(f"{failures.num_unexpected:,} items could not be encoded, among them {failed}.")
    return reasons


def _name(keys: list[str]) -> str:
    return "among them " + ", ".join(repr(key) for key in keys[:3])


def _look_at_results(
    context: RunContext, building: Generation, live: Generation, found: dict[str, Any], wait: Wait
) -> list[str]:
    if building.kind != VECTORS:
        validity = scan_validity(context.engine, building, check=context.check)
        found[building.kind] = validity.to_json()
        return validity.list_problems()
    soundness = scan_vectors(context.engine, building, check=context.check)
    found["vectors"] = soundness.to_json()
    reasons = []
    if soundness.num_not_finite or soundness.num_zero:
        reasons.append(
            f"{soundness.num_not_finite:,} vectors are not finite and {soundness.num_zero:,} are zero, "
            f"{_name(soundness.broken_keys)}."
        )
    if soundness.num_odd_norms:
        reasons.append(f"{soundness.num_odd_norms:,} vectors have not length 1, as the model promises.")
    return reasons


def _look_at_index(
    context: RunContext, building: Generation, live: Generation, found: dict[str, Any], wait: Wait
) -> list[str]:
    if building.kind != VECTORS:
        found["recall"] = None
        found["without_index"] = f"{building.kind} have no vector index, and so no recall"
        return []
    recall = measure_recall(context.engine, building, check=context.check)
    found["recall"] = recall.to_json() if recall is not None else None
    least = _option(context, "least_recall", LEAST_RECALL)
    if recall is None or recall.value >= least:
        return []
    return [
        f"The index {recall.index} finds {recall.value:.1%} of the {recall.limit} nearest rows, less than {least:.1%}."
    ]


def _look_at_texts(
    context: RunContext, building: Generation, live: Generation, found: dict[str, Any], wait: Wait
) -> list[str]:
    size = int(_option(context, "canary_sample", SAMPLE_SIZE))
    if size <= 0:
        found["texts"] = {"num_compared": 0, "reason": "the run was told to compare none"}
        return []
    agreement = compare_sample(context.engine, context.settings, building, size, check=context.check)
    found["texts"] = agreement.to_json()
    is_float = building.kind == VECTORS and building.spec.vector_type in (None, FLOAT16, FLOAT32)
    least = _option(context, "least_cosine", LEAST_COSINE) if is_float else agreement.least
    if agreement.smallest is None or (agreement.is_good and not (is_float and agreement.smallest < least)):
        return []
    differing = f" ({_name(agreement.differing_keys)})" if agreement.differing_keys else ""
    return [
        f"{agreement.num_compared} texts were encoded again and agree to {agreement.smallest:.5f} at the worst"
        f"{differing}, less than {least:g}."
    ]
