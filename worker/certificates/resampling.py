"""Encode a random sample of a job's texts again in a process of our own, and compare with the stored results."""

import json
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress
from typing import Any, Final
from uuid import UUID

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Engine

from vectormill.collections.codebooks import find_codebook
from vectormill.collections.generation_tables import find_ranges
from vectormill.domain.encoding import BINARY, FLOAT32, INT8, EncodingSpec
from vectormill.domain.errors import ModelError, WrongJobState
from vectormill.domain.task import DENSE, MULTI_VECTOR, RECORD, REPRESENTATIONS, VARYING
from vectormill.jobs.certificates import list_precisions
from vectormill.jobs.export import find_written, read_chunk_at
from vectormill.models.registry import open_registry
from vectormill.runs.samples import LEAST_AGREEMENT_OF_CODES, are_alike, compare_results
from vectormill.settings import Settings
from vectormill.vectors.quantization import Ranges
from vectormill.vectors.records import group_records
from vectormill.vectors.representations import measure_agreement, unpack
from worker.certificates.certificate import find_promise
from worker.devices.detect import detect_inventory
from worker.encoder.encoder import AUTO
from worker.engine.engine import Engine as EncodingEngine
from worker.engine.request import EncodeRequest
from worker.local import choose_device
from worker.settings import WorkerSettings, find_cache_dir

MOST_NAMED: Final = 20


@dataclass(frozen=True, slots=True)
class ResultAgreement:
    """The smallest and mean agreement of one result of the sampled items, such as `dense`, and the least allowed."""

    result: str
    smallest: float
    mean: float
    least: float


@dataclass(frozen=True, slots=True)
class JobVerdict:
    """The agreement of a sample of a job's results with those that its texts give now.

    `least` is what the precisions of both sides promise. `differing` are keys of items of which any result is below
    it, at most twenty.
    """

    job_id: UUID
    num_compared: int
    agreements: tuple[ResultAgreement, ...]
    num_differing: int
    differing: list[str]
    encoded_with: str

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "job_id": str(self.job_id)}


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
    Raises JobNotFound, WrongJobState for a job that has not ended, UnknownModel, and ModelError if the model is not the
    one that computed the results.
    """
    job, generation_id = find_written(database, job_id)
    spec = job.spec
    if not job.is_terminal:
        raise WrongJobState(f"The job is {job.state}; it can be verified when it has ended.")
    card = open_registry(settings, spec.model).card(spec.model, weights=True)
    if spec.revision not in card.revisions:
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
            return JobVerdict(job_id, 0, (), 0, [], device.description)
        wanted_spec = replace(spec, vector_type=FLOAT32) if spec.has_output(DENSE) else spec
        request = EncodeRequest("verify", wanted_spec, texts, False, settings.max_text_chars)
        found = engine.encode(request, threading.Event())
        report = engine.report()
    finally:
        engine.stop()
    with database.connect() as connection:
        ranges = find_ranges(connection, spec) if spec.vector_type == INT8 else None
        has_codes = generation_id is not None and find_codebook(connection, spec) is not None
        known = list_precisions(connection, job_id) or ["bf16"]  # of an unknown worker, the coarsest
    precisions = {report["precision"]["value"], *known}
    is_there = ~np.isin(np.arange(len(keys)), list(found.failures))
    is_packed = spec.result in VARYING
    now = [
        found.results.row(number).tobytes() if is_packed else found.vectors[number]
        for number in range(len(keys))
    ]
    pairs = list(compress(zip(rows, now, strict=True), is_there))
    is_good, agreements = is_there.copy(), []
    for result, (measured, least) in measure_pairs(
        spec, pairs, ranges, precisions, is_grouped=generation_id is not None, has_codes=has_codes
    ).items():
        agreement = np.zeros(len(keys))
        agreement[is_there] = measured
        is_good &= agreement >= least  # false for NaN too
        agreements.append(ResultAgreement(result, float(agreement.min()), float(agreement.mean()), least))
    differing = list(compress(keys, ~is_good))
    return JobVerdict(
        job_id,
        len(keys),
        tuple(agreements),
        len(differing),
        differing[:MOST_NAMED],
        f"{report['backend']['value']} {report['precision']['value']} on {device.description}",
    )


def measure_pairs(
    spec: EncodingSpec,
    pairs: Sequence[tuple[Any, Any]],
    ranges: Ranges | None,
    precisions: Iterable[str],
    *,
    is_grouped: bool,
    has_codes: bool = False,
) -> dict[str, tuple[NDArray[np.floating[Any]], float]]:
    """Return by result how well each pair of a stored and a new one agrees, and what the precisions promise.

    A record agrees by 1 or not at all: it must be equal, with confidences that differ by no more than scores may. The
    stored ones are grouped by type if a collection has them. With `has_codes` stored multi-vectors may have been
    residual codes, which keep no promise of a precision.
    """

    def promise(own: EncodingSpec) -> float:
        return min(find_promise(own, precision) for precision in precisions)

    if not pairs:
        return {}
    if spec.result == REPRESENTATIONS:
        measured = [measure_agreement(unpack(kept), unpack(now)) for kept, now in pairs]
        return {
            name: (
                np.array([each[name] for each in measured]),
                LEAST_AGREEMENT_OF_CODES
                if has_codes and name == MULTI_VECTOR
                else promise(spec.narrow((name,))),
            )
            for name in spec.outputs.split(",")
        }
    if spec.result == RECORD:
        own_form = group_records if is_grouped else bytes
        tolerance = 1 - promise(spec)
        are_equal = [are_alike(json.loads(kept), json.loads(own_form(now)), tolerance) for kept, now in pairs]
        return {RECORD: (np.array(are_equal, np.float64), 1.0)}
    kept, now = map(np.stack, zip(*pairs, strict=True))
    agreement, coarse = compare_results(spec, kept, now, ranges)
    return {spec.result: (agreement, coarse if spec.vector_type in (INT8, BINARY) else promise(spec))}
