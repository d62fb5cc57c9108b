"""Metrics that the API exposes to Prometheus: its own requests and queries, and the state in Postgres.

Workers need no port for metrics: they report their numbers to Postgres. Their sums start at 0 with each
worker process, as Prometheus expects of counters.
"""

import logging
from collections import Counter as Counted
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from vectormill.collections.descriptions import list_collection_rows
from vectormill.db.locks import limit_time
from vectormill.jobs.backlog import count_backlog, count_open_jobs, list_waiting
from vectormill.schedules.schedule import Schedule
from vectormill.schedules.schedules import list_schedules
from vectormill.webhooks.webhooks import count_deliveries
from vectormill.workers.proofs import count_failed_periods
from vectormill.workers.samples import list_device_uses
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
# It measures the tables of at most this many collections, the first by name.
MAX_COLLECTIONS: Final = 100
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
        self.refusals = Counter(
            "vectormill_query_answers_refused_total",
            "Answers in Redis that were no worker's: `reason` is unsigned, forged, unreadable or oversized.",
            ["reason"],
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


class BacklogCollector:
    """A collector that reads jobs, chunks, workers and more from Postgres at each scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        is_up = GaugeMetricFamily(
            "vectormill_database_up",
            "1 if Postgres answered this scrape; otherwise the scrape has no backlog.",
        )
        try:
            with self._engine.begin() as connection:
                limit_time(connection, SCRAPE_SECONDS)
                workers, signs = list_workers(connection), list_signs_of_life(connection)
                served = Counted(worker.model for worker in workers)
                read: list[tuple[MetricTable, Sequence[Any]]] = [
                    (JOBS, count_open_jobs(connection)),
                    (CHUNKS, count_backlog(connection)),
                    (FAULTS, [count_failed_periods(connection)]),
                    (PROCESSES, [(process, signs) for process in (SCHEDULER, INDEXER)]),
                    (REDIS, [signs]),
                    (QUEUES, list_waiting(connection)),
                    (MODELS, sorted(served.items())),
                    (WORK, workers),
                    (DEVICES, [(each, use) for each in workers for use in list_device_uses(each.report)]),
                    (SCHEDULES, list_schedules(connection, limit=MAX_SCHEDULES)),
                    (COLLECTIONS, list_collection_rows(connection, after=None, limit=MAX_COLLECTIONS)),
                    (WEBHOOKS, count_deliveries(connection)),
                ]
        except SQLAlchemyError as error:
            logger.warning("The scrape has no backlog, because Postgres did not answer: %s", error)
            is_up.add_metric([], 0)
            return [is_up]
        is_up.add_metric([], 1)
        return [is_up, *(metric for table, things in read for metric in table.describe(things))]


# The value of a thing: a number; one for each value of a further label; the buckets and the sum of a histogram; or
# None if the thing has none, so that there is no time series.
Value = float | Mapping[str, float] | tuple[Sequence[tuple[str, float]], float] | None


@dataclass(frozen=True, slots=True)
class MetricRow:
    """A metric: `read` returns its value of a thing, and `by` is the further label if there are several values."""

    kind: type[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]
    name: str
    told: str
    read: Callable[[Any], Value]
    by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricTable:
    """The metrics of things of one kind, which are labelled alike: by each label, how its value is read."""

    labels: Mapping[str, Callable[[Any], object]]
    rows: Sequence[MetricRow]

    def describe(self, things: Sequence[Any]) -> Iterator[Metric]:
        """Yield each metric with a time series for each thing that has a value."""
        for row in self.rows:
            metric: Any = row.kind(row.name, row.told, labels=[*self.labels, *row.by])
            for thing in things:
                values = [str(read(thing)) for read in self.labels.values()]
                value = row.read(thing)
                if isinstance(value, Mapping):
                    for key, number in value.items():
                        metric.add_metric([*values, key], number)
                elif isinstance(value, tuple):
                    metric.add_metric(values, *value)
                elif value is not None:
                    metric.add_metric(values, value)
            yield metric


GAUGE: Final = GaugeMetricFamily
COUNTER: Final = CounterMetricFamily
HISTOGRAM: Final = HistogramMetricFamily


def told(member: str) -> Callable[[Worker], Any]:
    """Return a function that reads a member of a worker's report; None if the worker does not report it."""
    return lambda worker: worker.report.get(member)


def told_histogram(member: str) -> Callable[[Worker], Value]:
    """Return a function that reads a histogram of a worker's report.

    The report counts each bucket separately, but Prometheus needs cumulative counts.
    """

    def read(worker: Worker) -> Value:
        found = worker.report.get(member)
        if found is None:
            return None
        bounds = [*(str(float(bound)) for bound in found["bounds"]), "+Inf"]
        return list(zip(bounds, accumulate(found["counts"]), strict=True)), found["sum"]

    return read


def count_padding(worker: Worker) -> float | None:
    computed = worker.report.get("num_computed_tokens")
    return None if computed is None else computed - worker.report["num_tokens"]


def find_next_due(schedule: Schedule) -> float | None:
    if schedule.next_due_at is None or schedule.paused_at is not None:
        return None
    return schedule.next_due_at.timestamp()


# fmt: off
OF_MODEL_AND_STATE: Final = {"model": attrgetter("model"), "state": attrgetter("state")}
JOBS: Final = MetricTable(OF_MODEL_AND_STATE, (
    MetricRow(GAUGE, "vectormill_jobs", "Jobs that have not ended; state paused shows forgotten ones.",
        attrgetter("num_jobs")),
))
CHUNKS: Final = MetricTable(OF_MODEL_AND_STATE, (
    MetricRow(GAUGE, "vectormill_chunks", "Chunks that have not ended, including those of paused jobs.",
        attrgetter("num_chunks")),
))
FAULTS: Final = MetricTable({}, (
    MetricRow(GAUGE, "vectormill_failed_proofs",
        "Periods of workers whose model process turned out to be faulty; results since the last good proof are "
        "encoded again.", float),
))
PROCESSES: Final = MetricTable({"process": itemgetter(0)}, (
    MetricRow(GAUGE, "vectormill_process_alive",
        "1 while a process of this kind (scheduler or indexer) sends heartbeats.",
        lambda found: float(found[0] in found[1])),
))
REDIS: Final = MetricTable({}, (
    MetricRow(GAUGE, "vectormill_redis_usable",
        "0 while the scheduler cannot reach Redis, or Redis accepts no message from it.",
        lambda signs: float(not signs & {REDIS_AWAY, REDIS_FULL})),
))
# A time series for each model that has open jobs and each priority. Chunks of paused jobs and of unfinished uploads
# are not counted, since workers may not take them.
QUEUES: Final = MetricTable({"model": attrgetter("model"), "priority": attrgetter("priority")}, (
    MetricRow(GAUGE, "vectormill_queue_waiting_chunks",
        "Chunks that no worker has claimed, except those of paused jobs.",
        lambda queue: queue.num_pending_chunks + queue.num_queued_chunks),
    MetricRow(GAUGE, "vectormill_queue_leased_chunks",
        "Chunks that workers have claimed; together with the waiting ones, the work that needs workers.",
        attrgetter("num_leased_chunks")),
    MetricRow(GAUGE, "vectormill_queue_items", "Items of waiting and leased chunks that have no result yet.",
        attrgetter("num_items")),
    MetricRow(GAUGE, "vectormill_queue_oldest_seconds",
        "Age of the oldest job with unclaimed chunks, without its pauses; absent if none is waiting.",
        attrgetter("oldest_seconds")),
))
MODELS: Final = MetricTable({"model": itemgetter(0)}, (
    MetricRow(GAUGE, "vectormill_workers", "Live workers.", itemgetter(1)),
))
WORK: Final = MetricTable({"worker": attrgetter("name"), "model": attrgetter("model")}, (
    MetricRow(COUNTER, "vectormill_stage_seconds_total",
        "Busy time of a worker by stage, including `held` and `device`.", told("stage_seconds"), ("stage",)),
    MetricRow(COUNTER, "vectormill_computed_tokens_total", "Tokens computed, including padding.",
        told("num_computed_tokens")),
    MetricRow(COUNTER, "vectormill_padding_tokens_total",
        "Computed tokens that were padding; divided by all computed tokens, the waste.", count_padding),
    MetricRow(COUNTER, "vectormill_reused_texts_total",
        "Texts that got the vector of an equal text; per job, `num_reused`.", told("num_reused")),
    MetricRow(COUNTER, "vectormill_computed_sequences_total",
        "Texts or passages that were computed; reused ones are not counted.", told("num_sequences")),
    MetricRow(COUNTER, "vectormill_words_total", "Words looked up in the word cache.", told("num_words")),
    MetricRow(COUNTER, "vectormill_known_words_total",
        "Words found in the word cache; divided by the words looked up, its hit rate.", told("num_known_words")),
    MetricRow(COUNTER, "vectormill_out_of_memory_total", "Batches that did not fit in a device's memory.",
        told("num_out_of_memory")),
    MetricRow(COUNTER, "vectormill_runner_restarts_total", "Restarts of the model's process.", told("num_restarts")),
    MetricRow(COUNTER, "vectormill_chunk_outcomes_total",
        "Messages by the outcome of their chunk: `done`, `split`, `lease lost`, `duplicate` and others.",
        told("chunk_outcomes"), ("outcome",)),
    MetricRow(COUNTER, "vectormill_redispatched_chunks_total",
        "Claimed chunks that had been dispatched before: lost, lapsed, handed back or retried.",
        told("num_redispatched_chunks")),
    MetricRow(COUNTER, "vectormill_stale_completions_total",
        "Chunks whose end a worker tried to write after losing the lease; the fence refused it.",
        told("num_stale_completions")),
    MetricRow(HISTOGRAM, "vectormill_dispatch_lag_seconds", "Time from the dispatch of a chunk to its claim.",
        told_histogram("dispatch_seconds")),
    MetricRow(HISTOGRAM, "vectormill_claim_to_commit_seconds", "Time from the message to the commit of a chunk.",
        told_histogram("claim_to_commit_seconds")),
))
DEVICES: Final = MetricTable({"worker": lambda each: each[0].name, "device": lambda each: each[1]["name"]}, (
    MetricRow(GAUGE, "vectormill_device_memory_used_bytes",
        "Memory in use: on a GPU by all programs, on a CPU by its model process.",
        lambda each: each[1]["memory_used_bytes"]),
    MetricRow(GAUGE, "vectormill_device_memory_total_bytes",
        "Total memory: of a GPU, or a CPU's share of the main memory.",
        lambda each: each[1]["memory_total_bytes"]),
    MetricRow(GAUGE, "vectormill_device_utilisation",
        "0 to 1: for a GPU as reported by its driver, for a CPU of its cores since the last heartbeat.",
        lambda each: each[1]["utilisation"]),
))
SCHEDULES: Final = MetricTable({"schedule": attrgetter("name"), "collection": attrgetter("collection")}, (
    MetricRow(GAUGE, "vectormill_schedule_consecutive_failures", "Runs that failed since the last success.",
        attrgetter("num_failures")),
    MetricRow(GAUGE, "vectormill_schedule_skipped",
        "Due times skipped since the last success because a run was in progress.", attrgetter("num_skipped")),
    MetricRow(GAUGE, "vectormill_schedule_last_success_timestamp_seconds",
        "When a run last succeeded; absent before the first success.",
        lambda schedule: schedule.last_success_at and schedule.last_success_at.timestamp()),
    MetricRow(GAUGE, "vectormill_schedule_next_due_timestamp_seconds",
        "When the schedule is next due; absent while it is paused.", find_next_due),
    MetricRow(GAUGE, "vectormill_schedule_lag_seconds", "How long a due time has waited for a scheduler.",
        attrgetter("lag_seconds")),
))
COLLECTIONS: Final = MetricTable({"collection": attrgetter("name")}, (
    MetricRow(GAUGE, "vectormill_collection_rows",
        "Approximate number of rows; like all metrics of collections, for the first 100 by name.",
        attrgetter("num_rows")),
    MetricRow(GAUGE, "vectormill_collection_bytes",
        "Bytes on disk of all generations, including indexes and attributes.", attrgetter("num_bytes")),
    MetricRow(GAUGE, "vectormill_collection_stale_seconds",
        "Time since the last successful re-index; absent before the first.", attrgetter("stale_seconds")),
))
# There are at most a hundred webhooks.
WEBHOOKS: Final = MetricTable({"webhook": attrgetter("webhook_id")}, (
    MetricRow(COUNTER, "vectormill_webhook_deliveries_total",
        "Deliveries by outcome: `delivered`; `refused`, an attempt that failed; `failed`, given up.",
        lambda webhook: {name: getattr(webhook, f"num_{name}") for name in ("delivered", "refused", "failed")},
        ("outcome",)),
    MetricRow(GAUGE, "vectormill_webhook_oldest_pending_seconds",
        "How long the oldest event that was neither delivered nor given up has been waiting.",
        attrgetter("oldest_seconds")),
    MetricRow(GAUGE, "vectormill_webhook_enabled",
        "0 if the webhook was disabled by a user or after days of failures.", lambda webhook: int(webhook.is_enabled)),
))
# fmt: on
