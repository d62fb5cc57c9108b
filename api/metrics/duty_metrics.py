"""Duties as Prometheus sees them: whether those processes live that nobody asks anything of."""

from collections.abc import Set as AbstractSet

from prometheus_client.core import GaugeMetricFamily, Metric

from vectormill.workers.workers import INDEXER, REDIS_AWAY, REDIS_FULL, SCHEDULER


def describe_duties(signs: AbstractSet[str]) -> list[Metric]:
    """`signs` are those of list_signs_of_life."""
    alive = GaugeMetricFamily(
        "vectormill_process_alive",
        "1 while a process of that kind, whichever, gives signs of life: scheduler, indexer.",
        labels=["process"],
    )
    redis = GaugeMetricFamily(
        "vectormill_redis_usable",
        "0 while the scheduler cannot reach Redis, or Redis takes no message from it.",
    )
    for process in (SCHEDULER, INDEXER):
        alive.add_metric([process], float(process in signs))
    redis.add_metric([], float(not signs & {REDIS_AWAY, REDIS_FULL}))
    return [alive, redis]
