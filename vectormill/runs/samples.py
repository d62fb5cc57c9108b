"""Samples: encode some texts of a generation again and compare the results with the stored ones.

The texts are those that the collection keeps or, if it keeps none, those still in the payloads of jobs.
Workers encode them as a temporary job that is deleted afterwards, because an indexer loads no model.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import compress
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Engine, text

from vectormill.collections.codebooks import find_codebook
from vectormill.collections.collection import Generation
from vectormill.collections.generation_tables import attributes_name, find_ranges, send_text
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import EncodingTimeout, ObjectChanged
from vectormill.domain.task import DENSE, MULTI_VECTOR
from vectormill.domain.vector_type import DEFAULT_TYPE
from vectormill.jobs.chunk import decode_payload
from vectormill.jobs.export import read_generation, read_results
from vectormill.jobs.item import Item, Items
from vectormill.jobs.job import INTERACTIVE_PRIORITY, Job, NewJob
from vectormill.jobs.jobs import delete_job, find_job
from vectormill.jobs.submission import JobWriter
from vectormill.results.kind import LEAST_AGREEMENT, Results
from vectormill.results.scores import LEAST_AGREEMENT_OF_SCORES
from vectormill.results.table import choose_kind
from vectormill.runs.checks import MOST_NAMED_KEYS
from vectormill.settings import Settings
from vectormill.vectors.quantization import Ranges

SAMPLE_KEPT_TEXTS: Final = """
    SELECT kept.key, {content} AS content, live.content_hash
      FROM vectormill.{attributes} AS kept TABLESAMPLE SYSTEM (:share)
      JOIN vectormill.{table} AS live ON live.key = kept.key
     WHERE kept.text IS NOT NULL ORDER BY random() LIMIT :limit
"""


def sample_kept_texts(connection: Connection, generation: Generation, size: int) -> list[tuple[Item, bytes]]:
    """Return up to `size` random items whose texts are kept, each with the content hash of its result."""
    table = generation.table_name
    content = send_text(generation.spec.text_columns, "kept")
    attributes = attributes_name(generation.id)
    statement = text(SAMPLE_KEPT_TEXTS.format(table=table, attributes=attributes, content=content))
    rows = connection.execute(statement, {"share": 10.0, "limit": size}).all()
    if len(rows) < size:  # a tenth of the blocks suffices unless the table is small
        rows = connection.execute(statement, {"share": 100.0, "limit": size}).all()
    return [(Item(row.key, bytes(row.content)), bytes(row.content_hash)) for row in rows]


# Reads texts from the chunks of the last hundred jobs that wrote to the generation and still exist.
SAMPLE_PAYLOADS: Final = text("""
    SELECT payload.items
      FROM (SELECT chunk.id FROM vectormill.chunks AS chunk
             WHERE chunk.state = 'done'
               AND chunk.job_id IN (SELECT id FROM vectormill.jobs WHERE generation_id = :generation_id
                                     ORDER BY seq DESC LIMIT 100)
             ORDER BY random() LIMIT :limit) AS chosen
      JOIN vectormill.chunk_payloads AS payload ON payload.chunk_id = chosen.id
""")


def sample_chunks(connection: Connection, generation: Generation, num_chunks: int) -> Iterator[Items]:
    """Yield the items of random completed chunks whose results were written to the generation."""
    values = {"generation_id": generation.id, "limit": num_chunks}
    for payload in connection.execute(SAMPLE_PAYLOADS, values).scalars():
        with suppress(ObjectChanged):  # texts by reference whose object is gone cannot be encoded again
            yield decode_payload(payload)


# Residual codes turn the vector of a token: of MiniLM's the cosine is 0.95 on average and 0.81 at least.
LEAST_AGREEMENT_OF_CODES: Final = 0.7
POLL_SECONDS: Final = 0.2
# A worker may have to load its model first, which takes minutes.
PATIENCE_SECONDS: Final = 600.0
CHUNKS_PER_SAMPLE: Final = 40


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of a generation's stored results with those that its texts give now.

    The measure is the cosine of vectors, the share of equal bits, 1 minus the largest relative difference of
    scores, and 1 or 0 for records that are equal or not. `least` is the threshold of good agreement. `reason`
    says where the texts came from or, if `num_compared` is 0, why nothing was compared.
    """

    num_compared: int
    smallest: float | None
    mean: float | None
    num_differing: int
    differing_keys: list[str]
    reason: str
    least: float = LEAST_AGREEMENT

    @property
    def is_good(self) -> bool:
        return self.num_differing == 0

    def to_json(self) -> dict[str, Any]:
        rounded = {
            name: None if value is None else round(value, 5)
            for name, value in (("smallest", self.smallest), ("mean", self.mean))
        }
        return {name: value for name, value in (asdict(self) | rounded).items() if name != "least"}


def sample_texts(connection: Connection, generation: Generation, size: int) -> tuple[list[Item], str]:
    """Return up to `size` random items whose texts are known, and a description of where these are from."""
    if kept := sample_kept_texts(connection, generation, size):
        return [item for item, _ in kept], "texts that the collection stores"
    items: list[Item] = []
    most = -(-size // CHUNKS_PER_SAMPLE) * 4
    for chunk in sample_chunks(connection, generation, CHUNKS_PER_SAMPLE):
        places = np.linspace(0, len(chunk) - 1, min(len(chunk), most)).astype(int)
        items += [chunk[place] for place in dict.fromkeys(places.tolist())]
    if items:
        unique = list({item.key: item for item in items}.values())
        return unique[:size], "texts of jobs that wrote to it"
    return [], (
        "no texts are available: the collection stores none, and no job that wrote to it exists any more"
    )


def compare_sample(
    engine: Engine, settings: Settings, generation: Generation, size: int, *, check: Callable[[], None]
) -> Agreement:
    """Encode a sample of texts again and compare it with the stored results.

    `check` is called while waiting. Raise EncodingTimeout if no worker encodes the sample in time.
    """
    with engine.connect() as connection:
        items, reason = sample_texts(connection, generation, size)
        # Only those whose text is still the one in the generation can be compared.
        results, present = read_generation(connection, generation.id, Items.of(items), generation.spec)
        held, rows = list(compress(items, present)), results[present]
        ranges = find_ranges(connection, generation.spec)
        has_codes = find_codebook(connection, generation.spec) is not None
    if items and not held:
        reason = "no row still has the text that was found for it"
    if not held:
        return Agreement(0, None, None, 0, [], reason)
    results, present = encode_again(engine, settings, generation, held, check=check)
    agreement, least = compare_results(
        generation.spec, rows[present], results[present], ranges, has_codes=has_codes
    )
    keys = [item.key for item, is_there in zip(held, present, strict=True) if is_there]
    if not keys:
        return Agreement(0, None, None, 0, [], "none of the sampled texts could be encoded again")
    differs = ~(agreement >= least)  # true for NaN too
    differing = [key for key, is_other in zip(keys, differs.tolist(), strict=True) if is_other]
    return Agreement(
        len(keys),
        float(agreement.min()),
        float(agreement.mean()),
        len(differing),
        differing[:MOST_NAMED_KEYS],
        reason,
        least,
    )


def compare_results(
    spec: EncodingSpec, kept: Results, now: Results, ranges: Ranges | None, *, has_codes: bool = False
) -> tuple[npt.NDArray[np.floating[Any]], float]:
    """Return the agreement [n] of stored results with new ones, and its threshold for these results.

    With `has_codes` stored multi-vectors may have been residual codes.
    """
    kind = choose_kind(spec)
    agreements = kind.compare(kept, now, spec, ranges, 1 - LEAST_AGREEMENT_OF_SCORES)
    if has_codes and MULTI_VECTOR in agreements:
        slack = (1 - LEAST_AGREEMENT) / (1 - LEAST_AGREEMENT_OF_CODES)
        agreements[MULTI_VECTOR] = 1 - (1 - agreements[MULTI_VECTOR]) * slack
    return np.min(list(agreements.values()), axis=0), kind.least_agreement(spec)  # NaN if one is


def encode_again(
    engine: Engine,
    settings: Settings,
    generation: Generation,
    items: Sequence[Item],
    *,
    check: Callable[[], None],
    patience_seconds: float = PATIENCE_SECONDS,
) -> tuple[Results, npt.NDArray[np.bool_]]:
    """Encode items as a temporary job; return results in their order, and which of them succeeded.

    Results are float32 [n, dimensions] or [n, labels], or records in the form that a collection keeps. Raise
    EncodingTimeout.
    """
    spec = generation.spec
    if generation.spec.has_output(DENSE):
        spec = replace(spec, vector_type=DEFAULT_TYPE.name)
    new_job = NewJob(spec, priority=INTERACTIVE_PRIORITY, lifetime_seconds=2 * patience_seconds)
    with JobWriter(engine, new_job, settings) as writer:
        for item in items:
            writer.add(Item(item.key, item.text))
        job = writer.finish()
    try:
        wait_for_end(engine, job, check, patience_seconds)
        blocks = list(read_results(engine, job.id))
    finally:
        with engine.begin() as connection:
            delete_job(connection, job.id)
    results, present = (
        np.concatenate([getattr(block, name) for block in blocks]) for name in ("results", "present")
    )
    return choose_kind(job.spec).keep_again(results), present


def wait_for_end(engine: Engine, job: Job, check: Callable[[], None], patience_seconds: float) -> None:
    deadline = time.monotonic() + patience_seconds
    while not job.is_terminal:
        if time.monotonic() >= deadline:
            raise EncodingTimeout(
                f"No worker for {job.spec.model} encoded the sample within {patience_seconds:g} s; check that one "
                "is running."
            )
        check()
        time.sleep(POLL_SECONDS)  # polls, because an indexer is not notified when a job ends
        with engine.connect() as connection:
            job = find_job(connection, job.id)
