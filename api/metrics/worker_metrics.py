"""WorkerMetrics: what live workers report of themselves, as Prometheus reads it. Workers need no port for it.

Sums start at 0 with each worker process, as Prometheus expects of counters.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from api.metrics.chunk_metrics import describe_chunks
from vectormill.workers.workers import Worker


def describe_workers(workers: Sequence[Worker]) -> Iterable[Metric]:
    """Families of all that the reports hold; what an older worker does not report is left out."""
    live = GaugeMetricFamily("vectormill_workers", "Live workers.", labels=["model"])
    served = [worker.model for worker in workers]
    for model in sorted(set(served)):
        live.add_metric([model], served.count(model))
    return [live, *_describe_work(workers), *describe_chunks(workers), *_describe_devices(workers)]


def _describe_work(workers: Sequence[Worker]) -> Iterable[Metric]:
    labels = ["worker", "model"]
    stages = CounterMetricFamily(
        "vectormill_stage_seconds_total",
        "Busy time of a worker by stage, `held` and `device`.",
        labels=[*labels, "stage"],
    )
    computed = CounterMetricFamily(
        "vectormill_computed_tokens_total", "Tokens computed, padding with them.", labels=labels
    )
    padding = CounterMetricFamily(
        "vectormill_padding_tokens_total",
        "Tokens computed that were padding; over those computed: the waste.",
        labels=labels,
    )
    reused = CounterMetricFamily(
        "vectormill_reused_texts_total",
        "Texts that got the vector of an equal one; of one job: its `num_reused`.",
        labels=labels,
    )
    sequences = CounterMetricFamily(
        "vectormill_computed_sequences_total",
        "Texts, or passages of them, that were computed; those reused are not.",
        labels=labels,
    )
    words = CounterMetricFamily(
        "vectormill_words_total", "Words of texts that were looked up in the word cache.", labels=labels
    )
    known = CounterMetricFamily(
        "vectormill_known_words_total",
        "Words whose tokens the word cache had; over those looked up: its hits.",
        labels=labels,
    )
    exhaustions = CounterMetricFamily(
        "vectormill_out_of_memory_total", "Batches for which a device had no memory.", labels=labels
    )
    restarts = CounterMetricFamily(
        "vectormill_runner_restarts_total", "Times that the model's process was started again.", labels=labels
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
        "Memory in use: of a GPU by all programs, of a CPU by the model's process.",
        labels=labels,
    )
    total = GaugeMetricFamily(
        "vectormill_device_memory_total_bytes",
        "Memory there is: of a GPU; of a CPU its share of the main memory.",
        labels=labels,
    )
    utilisation = GaugeMetricFamily(
        "vectormill_device_utilisation",
        "0 to 1: of a GPU as its driver says; of a CPU of its cores, since the last sign of life.",
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
