"""Metrics that the API exposes to Prometheus: its own requests and queries, and the state in Postgres.

Workers need no port for metrics: they report their numbers to Postgres. Their sums start at 0 with each
worker process, as Prometheus expects of counters.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from vectormill.collections.descriptions import CollectionRow, list_collection_rows
from vectormill.db.locks import limit_time
from vectormill.jobs.backlog import Waiting, count_backlog, count_open_jobs, list_waiting
from vectormill.schedules.schedule import Schedule
from vectormill.schedules.schedules import list_schedules
from vectormill.webhooks.webhooks import DeliveryCounts, count_deliveries
from vectormill.workers.proofs import count_failed_periods
from vectormill.workers.workers import (
    INDEXER,
    REDIS_AWAY,
    REDIS_FULL,
    SCHEDULER,
    Worker,
    list_signs_of_life,
    list_workers,
)

# If Postgres does not answer within this time, the scrape has no backlog.
SCRAPE_SECONDS: Final = 2.0
# A scrape has time series for at most this many schedules.
MAX_SCHEDULES: Final = 1000
# The buckets range from a status poll to an upload of ten million items.
REQUEST_SECONDS_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)

logger = logging.getLogger(__name__)


class ApiMetrics:
    """The metrics of one application.

    They have a registry of their own, so that two applications in one process do not collide.
    """

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "vectormill_http_requests_total",
            "HTTP requests; `route` is the template, never an id.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "vectormill_http_request_seconds",
            "Time from the first byte of a request to the last byte of its response.",
            ["method", "route"],
            buckets=REQUEST_SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.submitted_jobs = Counter(
            "vectormill_submitted_jobs_total", "Jobs accepted by this process.", registry=self.registry
        )
        self.submitted_items = Counter(
            "vectormill_submitted_items_total",
            "Items of the jobs accepted by this process.",
            registry=self.registry,
        )
        self.queries = QueryMetrics(self.registry)
        self.registry.register(BacklogCollector(engine))


class BacklogCollector:
    """A collector that reads jobs, chunks, workers and more from Postgres at each scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        is_up = GaugeMetricFamily(
            "vectormill_database_up",
            "1 if Postgres answered this scrape; otherwise the scrape has no backlog.",
        )
        jobs = GaugeMetricFamily(
            "vectormill_jobs",
            "Jobs that have not ended; state paused shows forgotten ones.",
            labels=["model", "state"],
        )
        chunks = GaugeMetricFamily(
            "vectormill_chunks",
            "Chunks that have not ended, including those of paused jobs.",
            labels=["model", "state"],
        )
        faults = GaugeMetricFamily(
            "vectormill_failed_proofs",
            "Periods of workers whose model process turned out to be faulty; results since the last good proof are "
            "encoded again.",
        )
        try:
            with self._engine.begin() as connection:
                limit_time(connection, SCRAPE_SECONDS)
                backlog, live_workers = count_backlog(connection), list_workers(connection)
                open_jobs, queues = count_open_jobs(connection), list_waiting(connection)
                signs = list_signs_of_life(connection)
                schedules = list_schedules(connection, limit=MAX_SCHEDULES)
                collections = list_collection_rows(connection, after=None, limit=MAX_COLLECTIONS)
                webhooks = count_deliveries(connection)
                faults.add_metric([], count_failed_periods(connection))
        except SQLAlchemyError as error:
            logger.warning("The scrape has no backlog, because Postgres did not answer: %s", error)
            is_up.add_metric([], 0)
            return [is_up]
        is_up.add_metric([], 1)
        for entry in backlog:
            chunks.add_metric([entry.model, entry.state], entry.num_chunks)
        for group in open_jobs:
            jobs.add_metric([group.model, group.state], group.num_jobs)
        return [
            is_up,
            jobs,
            chunks,
            faults,
            *describe_duties(signs),
            *describe_queues(queues),
            *describe_workers(live_workers),
            *describe_schedules(schedules),
            *describe_collections(collections),
            *describe_webhooks(webhooks),
        ]


# The buckets range from a forward pass of one text on a GPU to the time-out of a search.
QUERY_SECONDS_BUCKETS: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class QueryMetrics:
    """Metrics of the texts that this API process has sent to workers to be encoded while a client waits."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.texts = Counter(
            "vectormill_query_texts_total", "Texts of searches that were sent to workers.", registry=registry
        )
        self.messages = Counter(
            "vectormill_query_messages_total",
            "Messages in which texts of searches were sent to workers.",
            registry=registry,
        )
        self.repeats = Counter(
            "vectormill_query_repeats_total",
            "Searches whose texts were sent again because a worker or Redis had lost them.",
            registry=registry,
        )
        self.seconds = Histogram(
            "vectormill_query_seconds",
            "Time until the texts of a search were encoded.",
            buckets=QUERY_SECONDS_BUCKETS,
            registry=registry,
        )

    @contextmanager
    def time(self, num_texts: int) -> Iterator[None]:
        """Count `num_texts` texts, and time the block, in which a request waits for their vectors."""
        self.texts.inc(num_texts)
        with self.seconds.time():
            yield


def describe_queues(queues: Iterable[Waiting]) -> list[Metric]:
    """Return metrics of queues, with a time series for each model that has open jobs and each priority.

    Chunks of paused jobs and of unfinished uploads are not counted, since workers may not take them.
    """
    labels = ["model", "priority"]
    waiting = GaugeMetricFamily(
        "vectormill_queue_waiting_chunks",
        "Chunks that no worker has claimed, except those of paused jobs.",
        labels=labels,
    )
    leased = GaugeMetricFamily(
        "vectormill_queue_leased_chunks",
        "Chunks that workers have claimed; together with the waiting ones, the work that needs workers.",
        labels=labels,
    )
    items = GaugeMetricFamily(
        "vectormill_queue_items", "Items of waiting and leased chunks that have no result yet.", labels=labels
    )
    oldest = GaugeMetricFamily(
        "vectormill_queue_oldest_seconds",
        "Age of the oldest job with unclaimed chunks, without its pauses; absent if none is waiting.",
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


def describe_workers(workers: Sequence[Worker]) -> Iterable[Metric]:
    """Return metrics of what workers report. Numbers that a worker does not report are left out."""
    live = GaugeMetricFamily("vectormill_workers", "Live workers.", labels=["model"])
    served = [worker.model for worker in workers]
    for model in sorted(set(served)):
        live.add_metric([model], served.count(model))
    return [live, *_describe_work(workers), *describe_chunks(workers), *_describe_devices(workers)]


def _describe_work(workers: Sequence[Worker]) -> Iterable[Metric]:
    labels = ["worker", "model"]
    stages = CounterMetricFamily(
        "vectormill_stage_seconds_total",
        "Busy time of a worker by stage, including `held` and `device`.",
        labels=[*labels, "stage"],
    )
    computed = CounterMetricFamily(
        "vectormill_computed_tokens_total", "Tokens computed, including padding.", labels=labels
    )
    padding = CounterMetricFamily(
        "vectormill_padding_tokens_total",
        "Computed tokens that were padding; divided by all computed tokens, the waste.",
        labels=labels,
    )
    reused = CounterMetricFamily(
        "vectormill_reused_texts_total",
        "Texts that got the vector of an equal text; per job, `num_reused`.",
        labels=labels,
    )
    sequences = CounterMetricFamily(
        "vectormill_computed_sequences_total",
        "Texts or passages that were computed; reused ones are not counted.",
        labels=labels,
    )
    words = CounterMetricFamily("vectormill_words_total", "Words looked up in the word cache.", labels=labels)
    known = CounterMetricFamily(
        "vectormill_known_words_total",
        "Words found in the word cache; divided by the words looked up, its hit rate.",
        labels=labels,
    )
    exhaustions = CounterMetricFamily(
        "vectormill_out_of_memory_total", "Batches that did not fit in a device's memory.", labels=labels
    )
    restarts = CounterMetricFamily(
        "vectormill_runner_restarts_total", "Restarts of the model's process.", labels=labels
    )
    told = {
        "num_reused": reused,
        "num_sequences": sequences,
        "num_words": words,
        "num_known_words": known,
        "num_out_of_memory": exhaustions,
        "num_restarts": restarts,
    }
    for worker in workers:
        report, values = worker.report, [worker.name, worker.model]
        for stage, seconds in (report.get("stage_seconds") or {}).items():
            stages.add_metric([*values, stage], seconds)
        if "num_computed_tokens" in report:
            computed.add_metric(values, report["num_computed_tokens"])
            padding.add_metric(values, report["num_computed_tokens"] - report["num_tokens"])
        for member, family in told.items():
            if member in report:
                family.add_metric(values, report[member])
    return [stages, computed, padding, *told.values()]


def _describe_devices(workers: Sequence[Worker]) -> Iterable[Metric]:
    labels = ["worker", "device"]
    used = GaugeMetricFamily(
        "vectormill_device_memory_used_bytes",
        "Memory in use: on a GPU by all programs, on a CPU by the model's process.",
        labels=labels,
    )
    total = GaugeMetricFamily(
        "vectormill_device_memory_total_bytes",
        "Total memory: of a GPU, or a CPU's share of the main memory.",
        labels=labels,
    )
    utilisation = GaugeMetricFamily(
        "vectormill_device_utilisation",
        "0 to 1: for a GPU as reported by its driver, for a CPU of its cores since the last heartbeat.",
        labels=labels,
    )
    families = {
        "device_memory_used_bytes": used,
        "device_memory_total_bytes": total,
        "device_utilisation": utilisation,
    }
    for worker in workers:
        for member, family in families.items():
            value = worker.report.get(member)
            if value is not None:
                family.add_metric([worker.name, _name_device(worker.report)], value)
    return list(families.values())


def _name_device(report: dict[str, Any]) -> str:
    device = report.get("device")
    return str(device.get("value", "")) if isinstance(device, dict) else ""


def describe_chunks(workers: Sequence[Worker]) -> list[Metric]:
    """Return metrics of chunks, from the reports of workers. Missing numbers are left out."""
    labels = ["worker", "model"]
    outcomes = CounterMetricFamily(
        "vectormill_chunk_outcomes_total",
        "Messages by the outcome of their chunk: `done`, `split`, `lease lost`, `duplicate` and others.",
        labels=[*labels, "outcome"],
    )
    redispatched = CounterMetricFamily(
        "vectormill_redispatched_chunks_total",
        "Claimed chunks that had been dispatched before: lost, lapsed, handed back or retried.",
        labels=labels,
    )
    stale = CounterMetricFamily(
        "vectormill_stale_completions_total",
        "Chunks whose end a worker tried to write after losing the lease; the fence refused it.",
        labels=labels,
    )
    dispatch = HistogramMetricFamily(
        "vectormill_dispatch_lag_seconds", "Time from the dispatch of a chunk to its claim.", labels=labels
    )
    commit = HistogramMetricFamily(
        "vectormill_claim_to_commit_seconds", "Time from the message to the commit of a chunk.", labels=labels
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
    """Add a worker's histogram to a metric.

    The report counts each bucket separately, but Prometheus needs cumulative counts.
    """
    bounds = [*(str(float(bound)) for bound in told["bounds"]), "+Inf"]
    family.add_metric(values, list(zip(bounds, accumulate(told["counts"]), strict=True)), told["sum"])


def describe_duties(signs: AbstractSet[str]) -> list[Metric]:
    """Return metrics of the scheduler, the indexer and Redis, from the result of list_signs_of_life."""
    alive = GaugeMetricFamily(
        "vectormill_process_alive",
        "1 while a process of this kind (scheduler or indexer) sends heartbeats.",
        labels=["process"],
    )
    redis = GaugeMetricFamily(
        "vectormill_redis_usable",
        "0 while the scheduler cannot reach Redis, or Redis accepts no message from it.",
    )
    for process in (SCHEDULER, INDEXER):
        alive.add_metric([process], float(process in signs))
    redis.add_metric([], float(not signs & {REDIS_AWAY, REDIS_FULL}))
    return [alive, redis]


def describe_schedules(schedules: Sequence[Schedule]) -> list[Metric]:
    """Return metrics of schedules.

    A paused schedule has no due time, and one that never succeeded has no time of its last success.
    """
    labels = ["schedule", "collection"]
    failures = GaugeMetricFamily(
        "vectormill_schedule_consecutive_failures", "Runs that failed since the last success.", labels=labels
    )
    skipped = GaugeMetricFamily(
        "vectormill_schedule_skipped",
        "Due times skipped since the last success because a run was in progress.",
        labels=labels,
    )
    success = GaugeMetricFamily(
        "vectormill_schedule_last_success_timestamp_seconds",
        "When a run last succeeded; absent before the first success.",
        labels=labels,
    )
    next_due = GaugeMetricFamily(
        "vectormill_schedule_next_due_timestamp_seconds",
        "When the schedule is next due; absent while it is paused.",
        labels=labels,
    )
    lag = GaugeMetricFamily(
        "vectormill_schedule_lag_seconds", "How long a due time has waited for a scheduler.", labels=labels
    )
    for schedule in schedules:
        values = [schedule.name, schedule.collection]
        failures.add_metric(values, schedule.num_failures)
        skipped.add_metric(values, schedule.num_skipped)
        lag.add_metric(values, schedule.lag_seconds)
        if schedule.last_success_at is not None:
            success.add_metric(values, schedule.last_success_at.timestamp())
        if schedule.next_due_at is not None and schedule.paused_at is None:
            next_due.add_metric(values, schedule.next_due_at.timestamp())
    return [failures, skipped, success, next_due, lag]


# A scrape measures the tables of at most this many collections, the first by name.
MAX_COLLECTIONS: Final = 100


def describe_collections(collections: Iterable[CollectionRow]) -> list[Metric]:
    """Return metrics of collections: rows, bytes on disk, and seconds since the last re-index."""
    rows = GaugeMetricFamily(
        "vectormill_collection_rows",
        "Approximate number of rows; like all metrics of collections, for the first 100 by name.",
        labels=["collection"],
    )
    num_bytes = GaugeMetricFamily(
        "vectormill_collection_bytes",
        "Bytes on disk of all generations, including indexes and attributes.",
        labels=["collection"],
    )
    staleness = GaugeMetricFamily(
        "vectormill_collection_stale_seconds",
        "Time since the last successful re-index; absent before the first.",
        labels=["collection"],
    )
    for collection in collections:
        rows.add_metric([collection.name], collection.num_rows)
        num_bytes.add_metric([collection.name], collection.num_bytes)
        if collection.stale_seconds is not None:
            staleness.add_metric([collection.name], collection.stale_seconds)
    return [rows, num_bytes, staleness]


def describe_webhooks(counts: Sequence[DeliveryCounts]) -> list[Metric]:
    """Return metrics of webhooks. There are at most a hundred webhooks."""
    labels = ["webhook"]
    deliveries = CounterMetricFamily(
        "vectormill_webhook_deliveries_total",
        "Deliveries by outcome: `delivered`; `refused`, an attempt that failed; `failed`, given up.",
        labels=["webhook", "outcome"],
    )
    oldest = GaugeMetricFamily(
        "vectormill_webhook_oldest_pending_seconds",
        "How long the oldest event that was neither delivered nor given up has been waiting.",
        labels=labels,
    )
    enabled = GaugeMetricFamily(
        "vectormill_webhook_enabled",
        "0 if the webhook was disabled by a user or after days of failures.",
        labels=labels,
    )
    for webhook in counts:
        name = str(webhook.webhook_id)
        deliveries.add_metric([name, "delivered"], webhook.num_delivered)
        deliveries.add_metric([name, "refused"], webhook.num_refused)
        deliveries.add_metric([name, "failed"], webhook.num_failed)
        oldest.add_metric([name], webhook.oldest_seconds)
        enabled.add_metric([name], int(webhook.is_enabled))
    return [deliveries, oldest, enabled]
