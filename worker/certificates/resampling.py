"""Encode a random sample of a job's texts again in a process of our own, and compare with the stored results."""

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
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import ModelError, WrongJobState
from vectormill.domain.task import DENSE, MULTI_VECTOR, RECORD, REPRESENTATIONS, VARYING
from vectormill.domain.vector_type import DEFAULT_TYPE
from vectormill.jobs.certificates import list_precisions
from vectormill.jobs.export import find_written, read_chunk_at
from vectormill.models.registry import open_registry
from vectormill.results.kind import take_objects
from vectormill.results.table import RESULT_KINDS
from vectormill.runs.samples import LEAST_AGREEMENT_OF_CODES
from vectormill.settings import Settings
from vectormill.vectors.quantization import Ranges
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
        wanted_spec = replace(spec, vector_type=DEFAULT_TYPE.name) if spec.has_output(DENSE) else spec
        request = EncodeRequest("verify", wanted_spec, texts, False, settings.max_text_chars)
        found = engine.encode(request, threading.Event())
        report = engine.report()
    finally:
        engine.stop()
    with database.connect() as connection:
        ranges = find_ranges(connection, spec)
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
    kind = RESULT_KINDS[spec.result]
    kept, now = (
        take_objects(side) if spec.result in VARYING else np.stack(side) for side in zip(*pairs, strict=True)
    )
    if is_grouped and spec.result in VARYING:
        now = kind.keep_again(now)
    agreements = kind.compare(kept, now, spec, ranges, tolerance=1 - promise(spec))

    def find_least(name: str) -> float:
        if spec.result == REPRESENTATIONS:
            has_code = has_codes and name == MULTI_VECTOR
            return LEAST_AGREEMENT_OF_CODES if has_code else promise(spec.narrow((name,)))
        is_coarse = spec.result == RECORD or not spec.delivered_type.is_float
        return kind.least_agreement(spec) if is_coarse else promise(spec)

    return {name: (agreement, find_least(name)) for name, agreement in agreements.items()}
