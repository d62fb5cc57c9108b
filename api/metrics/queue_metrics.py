"""Queues as Prometheus sees them: how much waits for workers of a model at a priority, and for how long.

As many series as models with open jobs, times ten priorities at the most.
"""

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric

from vectormill.jobs.backlog import Waiting


def describe_queues(queues: Iterable[Waiting]) -> list[Metric]:
    """Return metrics of queues. Chunks of paused jobs and of unfinished uploads are not counted: no worker is
    to have them.
    """
    labels = ["model", "priority"]
    waiting = GaugeMetricFamily(
        "vectormill_queue_waiting_chunks",
        "Chunks that no worker has yet; those of paused jobs left out.",
        labels=labels,
    )
    leased = GaugeMetricFamily(
        "vectormill_queue_leased_chunks",
        "Chunks that workers have; with those that wait, what workers are needed for.",
        labels=labels,
    )
    items = GaugeMetricFamily(
        "vectormill_queue_items", "Items of both that have no result yet.", labels=labels
    )
    oldest = GaugeMetricFamily(
        "vectormill_queue_oldest_seconds",
        "Age of the oldest job with chunks that no worker has, its pauses left out; absent where none waits.",
        labels=labels,
    )
    for queue in queues:
        values = [queue.model, str(queue.priority)]
        waiting.add_metric(values, queue.num_pending_chunks + queue.num_queued_chunks)
        leased.add_metric(values, queue.num_leased_chunks)
        items.add_metric(values, queue.num_items)
        if queue.oldest_seconds is not None:
            oldest.add_metric(values, queue.oldest_seconds)
    return [waiting, leased, items, oldest]
