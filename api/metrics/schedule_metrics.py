"""Schedules as Prometheus sees them: whether what is due happens, and whether it succeeds."""

from collections.abc import Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from vectormill.schedules.schedule import Schedule


def describe_schedules(schedules: Sequence[Schedule]) -> list[Metric]:
    """One series a schedule. A paused one has no due time, and one that never succeeded no success."""
    labels = ["schedule", "collection"]
    failures = GaugeMetricFamily(
        "vectormill_schedule_consecutive_failures", "Runs that failed since the last success.", labels=labels
    )
    skipped = GaugeMetricFamily(
        "vectormill_schedule_skipped",
        "Due times since the last success that passed because a run was going on.",
        labels=labels,
    )
    success = GaugeMetricFamily(
        "vectormill_schedule_last_success_timestamp_seconds",
        "When a run last ended well; absent before the first.",
        labels=labels,
    )
    next_due = GaugeMetricFamily(
        "vectormill_schedule_next_due_timestamp_seconds",
        "When it is due; absent while it is paused.",
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
