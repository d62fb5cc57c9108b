"""Our service from end to end, extracting: a job a schema, all submitted at once."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.cases.tasks.extract_texts import split_tag, write_schema
from benchmarks.order import BenchmarkFailed
from benchmarks.probes.process_tree import CELERY_WORKER, MODEL_PROCESS, find_named, list_tree
from benchmarks.systems.extraction.rows import digest_records
from benchmarks.systems.own.own_stack import OwnStack
from benchmarks.systems.peers.serving import WARM_UP_SHARE
from benchmarks.systems.protocol import Pass
from benchmarks.systems.service import POLL_SECONDS
from benchmarks.systems.system import EncodingProcesses
from vectormill.client import Client
from vectormill.domain.jobs.job import COMPLETED
from vectormill.domain.tasks.task import EXTRACT
from vectormill.files.ndjson import ItemJson


class ExtractService:
    """A System. `texts` are tagged ones, by mix; the time ends when the last job's last records are committed."""

    name = "ours, end to end"

    def __init__(
        self, data_dir: Path, texts: Mapping[str, Sequence[str]], settings: Mapping[str, str], model: str
    ) -> None:
        self._data_dir = data_dir
        self._texts = texts
        self._settings = settings
        self._model = model
        self._exits = ExitStack()
        # Of the last pass.
        self._jobs: Sequence[Mapping[str, Any]] = []
        self._num_texts = 0
        self._num_records = 0

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            self._stack = exits.enter_context(OwnStack(self._data_dir, self._settings, self._model))
            self._client = exits.enter_context(Client(self._stack.wait_until_ready()))
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    def warm_up(self, mix: str) -> None:
        self._extract(self._texts[mix][::WARM_UP_SHARE])

    def encode(self, mix: str) -> Pass:
        started_at = datetime.now(UTC)
        self._extract(self._texts[mix])
        ended_at = max(datetime.fromisoformat(job["finished_at"]) for job in self._jobs)
        num_tokens = sum(job["num_tokens"] for job in self._jobs)
        computed = sum(round(job["num_tokens"] / (1 - job["padding_waste"])) for job in self._jobs)
        return Pass((ended_at - started_at).total_seconds(), num_tokens, computed)

    def _extract(self, texts: Sequence[str]) -> None:
        by_schema: dict[int, list[ItemJson]] = {}
        for place, tagged in enumerate(texts):
            number, text = split_tag(tagged)
            by_schema.setdefault(number, []).append({"key": f"{place}", "text": text})
        submitted = [
            self._client.submit(items, model=self._model, task=EXTRACT, extract_schema=write_schema(number))
            for number, items in by_schema.items()
        ]
        self._jobs = [self._client.wait(job["id"], poll_seconds=POLL_SECONDS) for job in submitted]
        self._num_texts = len(texts)
        for job in self._jobs:
            if job["state"] != COMPLETED:
                raise BenchmarkFailed(
                    f"A job ended {job['state']}, with {job['num_failed']:,} of {job['num_items']:,} failed."
                )

    def vectors(self) -> NDArray[np.float32]:
        """A digest of each text's records, read back over HTTP. Raises BenchmarkFailed when a text has none."""
        records: dict[int, Any] = {}
        for job in self._jobs:
            for record in self._client.records(job["id"]):
                records[int(record["key"])] = record["output"]
        if len(records) != self._num_texts:
            raise BenchmarkFailed(f"{self._num_texts - len(records):,} texts have no records.")
        self._num_records = sum(map(len, records.values()))
        return digest_records([records[place] for place in range(self._num_texts)])

    def report(self) -> dict[str, Any]:
        """Batches are known to the engine alone, whose row tells what of them is padding."""
        return {"num_records": self._num_records, "square_padding": None}

    def find_processes(self) -> EncodingProcesses:
        tree = list_tree(self._stack.pid)
        model = find_named(tree, MODEL_PROCESS)
        return EncodingProcesses(model=model, whole=[*model, *find_named(tree, CELERY_WORKER)])
