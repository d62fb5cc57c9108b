"""Webhooks as Prometheus sees them: whether what ends is told, and how long it takes."""

from collections.abc import Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from vectormill.webhooks.webhooks import DeliveryCounts


def describe_webhooks(counts: Sequence[DeliveryCounts]) -> list[Metric]:
    """A few series a webhook, of which there are at most a hundred."""
    labels = ["webhook"]
    deliveries = CounterMetricFamily(
        "vectormill_webhook_deliveries_total",
        "By outcome: `delivered`; `refused`, an attempt that failed; `failed`, given up.",
        labels=["webhook", "outcome"],
    )
    oldest = GaugeMetricFamily(
        "vectormill_webhook_oldest_pending_seconds",
        "How long the oldest event has waited that was neither delivered nor given up.",
        labels=labels,
    )
    enabled = GaugeMetricFamily(
        "vectormill_webhook_enabled", "0 when somebody disabled it, or days of failures did.", labels=labels
    )
    for webhook in counts:
        name = str(webhook.webhook_id)
        deliveries.add_metric([name, "delivered"], webhook.num_delivered)
        deliveries.add_metric([name, "refused"], webhook.num_refused)
        deliveries.add_metric([name, "failed"], webhook.num_failed)
        oldest.add_metric([name], webhook.oldest_seconds)
        enabled.add_metric([name], int(webhook.is_enabled))
    return [deliveries, oldest, enabled]
