"""QueryMetrics: what Prometheus reads of the queries that this API process had encoded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

# From a forward pass of one text on a GPU to the time-out of a search.
QUERY_SECONDS_BUCKETS: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class QueryMetrics:
    """In the registry of the application."""

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
            "Searches whose texts were sent again, for a worker or Redis had lost them.",
            registry=registry,
        )
        self.seconds = Histogram(
            "vectormill_query_seconds",
            "Time until the texts of a search had their vectors.",
            buckets=QUERY_SECONDS_BUCKETS,
            registry=registry,
        )

    @contextmanager
    def time(self, num_texts: int) -> Iterator[None]:
        """For as long as a request waits for the vectors of so many texts."""
        self.texts.inc(num_texts)
        with self.seconds.time():
            yield
