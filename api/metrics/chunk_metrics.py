"""Chunks as workers report them: how they ended, what was refused, and how long messages and work took."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from vectormill.workers.workers import Worker


def describe_chunks(workers: Sequence[Worker]) -> list[Metric]:
    """Return metrics of chunks. Numbers that a worker does not report are left out."""
    labels = ["worker", "model"]
    outcomes = CounterMetricFamily(
        "vectormill_chunk_outcomes_total",
        "Messages by what became of their chunk: `done`, `split`, `lease lost`, `duplicate` and others.",
        labels=[*labels, "outcome"],
    )
    redispatched = CounterMetricFamily(
        "vectormill_redispatched_chunks_total",
        "Chunks claimed that had been dispatched before: lost, lapsed, handed back or tried again.",
        labels=labels,
    )
    stale = CounterMetricFamily(
        "vectormill_stale_completions_total",
        "Chunks whose end a worker would have written after it lost the lease; the fence refused.",
        labels=labels,
    )
    dispatch = HistogramMetricFamily(
        "vectormill_dispatch_lag_seconds", "From the dispatch of a chunk to its claim.", labels=labels
    )
    commit = HistogramMetricFamily(
        "vectormill_claim_to_commit_seconds", "From the message to the commit of a chunk.", labels=labels
    )
    for worker in workers:
        report, values = worker.report, [worker.name, worker.model]
        for outcome, count in (report.get("chunk_outcomes") or {}).items():
            outcomes.add_metric([*values, outcome], count)
        for member, family in (("num_redispatched_chunks", redispatched), ("num_stale_completions", stale)):
            if member in report:
                family.add_metric(values, report[member])
        for member, histogram in (("dispatch_seconds", dispatch), ("claim_to_commit_seconds", commit)):
            if member in report:
                _add(histogram, values, report[member])
    return [outcomes, redispatched, stale, dispatch, commit]


def _add(family: HistogramMetricFamily, values: Sequence[str], told: Mapping[str, Any]) -> None:
    """Counts of each bucket alone become those of all up to it."""
    bounds = [*(str(float(bound)) for bound in told["bounds"]), "+Inf"]
    family.add_metric(values, list(zip(bounds, accumulate(told["counts"]), strict=True)), told["sum"])
