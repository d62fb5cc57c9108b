"""Encode a random sample of a job's texts again in a process of our own, and compare with the stored results."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final
from uuid import UUID

import numpy as np
from sqlalchemy import Connection, Engine

from vectormill.collections.generation_tables import find_ranges
from vectormill.domain.encoding import BINARY, FLOAT32, INT8, EncodingSpec
from vectormill.domain.errors import ModelError, WrongJobState
from vectormill.domain.task import VARYING
from vectormill.jobs.certificates import list_precisions
from vectormill.jobs.export import find_written, read_chunk_at
from vectormill.models.registry import open_registry
from vectormill.runs.samples import compare_results
from vectormill.settings import Settings
from worker.certificates.certificate import find_promise
from worker.devices.detect import detect_inventory
from worker.encoder.encoder import AUTO
from worker.engine.engine import Engine as EncodingEngine
from worker.engine.request import EncodeRequest
from worker.local import choose_device
from worker.settings import WorkerSettings, find_cache_dir

MOST_NAMED: Final = 20


@dataclass(frozen=True, slots=True)
class JobVerdict:
    """The agreement of a sample of a job's results with those that its texts give now.

    `least` is what the precisions of both sides promise. `differing` are keys of items below it, at most twenty.
    """

    job_id: UUID
    num_compared: int
    smallest: float | None
    mean: float | None
    least: float
    num_differing: int
    differing: list[str]
    encoded_with: str

    def to_json(self) -> dict[str, Any]:
        names = ("num_compared", "smallest", "mean", "least", "num_differing", "differing", "encoded_with")
        return {"job_id": str(self.job_id), **{name: getattr(self, name) for name in names}}


def verify_job(
    database: Engine,
    job_id: UUID,
    num_items: int,
    settings: Settings,
    worker_settings: WorkerSettings,
    tell: Callable[[str, int, int], None],
    chance: random.Random,
) -> JobVerdict:
    """Compare up to `num_items` random items of an ended job with what their texts give now.

    Items without a result of this job are not compared: they failed, or a newer job has written their keys.
    Raises JobNotFound, WrongJobState for a job that has not ended or has records, UnknownModel, and ModelError
    if the model is not the one that computed the results.
    """
    job, generation_id = find_written(database, job_id)
    spec = job.spec
    if not job.is_terminal:
        raise WrongJobState(f"The job is {job.state}; it can be verified when it has ended.")
    if spec.result in VARYING:
        raise WrongJobState(f"The job has {spec.result}s; only vectors and scores can be verified.")
    card = open_registry(settings.models, spec.model).card(spec.model, weights=True)
    if card.revision != spec.revision:
        raise ModelError(
            f"The job was computed with revision {spec.revision} of {spec.model}, and here {card.revision} is "
            "registered."
        )
    keys: list[str] = []
    texts: list[bytes] = []
    rows = []
    wanted = sorted(chance.sample(range(job.num_items), min(num_items, job.num_items)))
    while wanted:
        with database.connect() as connection:
            first_item, items, results, present = read_chunk_at(connection, job, generation_id, wanted[0])
        end = first_item + len(items)
        for place in (position - first_item for position in wanted if position < end):
            if present[place] and items.texts[place]:
                keys.append(items.keys[place])
                texts.append(items.texts[place])
                rows.append(results[place])
        wanted = [position for position in wanted if position >= end]
        tell("reading", len(keys), num_items)
    device = choose_device(AUTO, detect_inventory())
    engine = EncodingEngine(card, device, worker_settings, find_cache_dir(settings))
    tell("encoding", 0, len(texts))
    engine.start()
    try:
        if not texts:
            return JobVerdict(job_id, 0, None, None, 0.0, 0, [], device.description)
        request = EncodeRequest(
            "verify", replace(spec, vector_type=FLOAT32), texts, False, settings.max_text_chars
        )
        found = engine.encode(request, threading.Event())
        report = engine.report()
    finally:
        engine.stop()
    with database.connect() as connection:
        ranges = find_ranges(connection, spec) if spec.vector_type == INT8 else None
        least = find_least(connection, job_id, report["precision"]["value"], spec)
    agreement, coarse = compare_results(spec, np.stack(rows), found.vectors, ranges)
    if spec.vector_type in (INT8, BINARY):
        least = coarse
    agreement = np.where(np.isin(np.arange(len(keys)), list(found.failures)), 0.0, agreement)
    differing = [key for key, value in zip(keys, agreement.tolist(), strict=True) if not value >= least]
    return JobVerdict(
        job_id,
        len(keys),
        float(agreement.min()),
        float(agreement.mean()),
        least,
        len(differing),
        differing[:MOST_NAMED],
        f"{report['backend']['value']} {report['precision']['value']} on {device.description}",
    )


def find_least(connection: Connection, job_id: UUID, precision: str, spec: EncodingSpec) -> float:
    """Return the least agreement that the precision here and those of the job's workers promise.

    A worker of which nothing is known may have computed in 16 bit.
    """
    known = list_precisions(connection, job_id) or ["bf16"]
    return min(find_promise(spec, each) for each in (precision, *known))
