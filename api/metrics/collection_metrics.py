"""Metrics of collections: how many rows, how many bytes, how stale."""

from collections.abc import Iterable
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric

from vectormill.collections.descriptions import CollectionRow

# Series of a scrape, and looks at the sizes of tables; the first by name are shown when there are more.
MAX_COLLECTIONS: Final = 100


def describe_collections(collections: Iterable[CollectionRow]) -> list[Metric]:
    rows = GaugeMetricFamily(
        "vectormill_collection_rows",
        "About how many; of the first 100 collections by name, as all of collections.",
        labels=["collection"],
    )
    num_bytes = GaugeMetricFamily(
        "vectormill_collection_bytes",
        "On disk, of every generation with its indexes and attributes.",
        labels=["collection"],
    )
    staleness = GaugeMetricFamily(
        "vectormill_collection_stale_seconds",
        "Since the last successful re-index; absent before the first.",
        labels=["collection"],
    )
    for collection in collections:
        rows.add_metric([collection.name], collection.num_rows)
        num_bytes.add_metric([collection.name], collection.num_bytes)
        if collection.stale_seconds is not None:
            staleness.add_metric([collection.name], collection.stale_seconds)
    return [rows, num_bytes, staleness]
