"""Our service from end to end with pairs: they go in over HTTP, and the time ends when the last score is committed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.systems.service import Service
from vectormill.files.ndjson import ItemJson


class PairService(Service):
    """Scores are in no collection: each pass is a job."""

    def submit(self, items: Sequence[ItemJson]) -> Mapping[str, Any]:
        return self.client.submit(items, model=self.model)

    def read(self, job_id: str) -> Iterator[tuple[str, list[float]]]:
        for score in self.client.scores(job_id):
            yield score["key"], list(score["probabilities"].values())
