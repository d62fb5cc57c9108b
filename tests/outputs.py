"""Small steps for tests with outputs in object storage: encode chunks with known results, close, sweep."""

import threading
from unittest.mock import patch

import numpy as np
from sqlalchemy import Engine

from tests.database import ask, load_payload
from tests.obedient_engine import encoding_chunks, run_to_end
from tests.protocol import SPEC, claim, dispatch_all, results_of, submit
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import VECTOR
from vectormill.files.roots import ANYWHERE
from vectormill.jobs.chunk import ChunkOutcome, Claim
from vectormill.jobs.item import Item
from vectormill.jobs.job import Job
from vectormill.objects import parts
from vectormill.objects.output import CLOSING, HeldOutput, claim_output
from vectormill.work.work import handing_back
from worker.chunk.commit import PostgresSink


def keep_outputs(engine: Engine, grace_seconds: float = 0, part_bytes: int = 1) -> int:
    """Close and sweep what is due, as an indexer does; return the number of steps.

    By default the results of each chunk become a part of their own.
    """
    num_steps = 0
    while True:
        claimed = ask(engine, claim_output, "test", 30)
        if claimed is None:
            return num_steps
        num_steps += 1
        held = HeldOutput(
            engine=engine, lease=claimed[0], is_stopping=lambda: False, place=claimed[1], roots=ANYWHERE
        )
        with handing_back(engine, claimed[0]), patch.object(parts, "PART_BYTES", part_bytes):
            if claimed[0].state == CLOSING:
                parts.close_output(held, grace_seconds)
            else:
                parts.sweep(held, grace_seconds)


def finish(engine: Engine, claimed: Claim) -> None:
    """Encode and commit a chunk of scores or records with known results, as a worker does."""
    items = ask(engine, load_payload, claimed.chunk_id)
    results = results_of(claimed.spec, list(items))
    outcome = ChunkOutcome({}, 1, 1)
    PostgresSink(engine, threading.Event(), output_roots=ANYWHERE).commit(
        claimed, items, np.arange(len(items)), results, outcome
    )


def encode(engine: Engine, job: Job) -> None:
    """Encode a job's chunks with known results."""
    if job.spec.result == VECTOR:
        with encoding_chunks(engine) as encoder:
            run_to_end(engine, encoder, job)
    else:
        encode_waiting(engine)


def encode_waiting(engine: Engine) -> None:
    """Encode all waiting chunks with known results, without a chunk encoder."""
    while dispatches := dispatch_all(engine):
        for dispatch in dispatches:
            claimed = claim(engine, dispatch.chunk_id)
            assert claimed is not None
            finish(engine, claimed)


def finish_all(engine: Engine) -> None:
    """Encode all waiting chunks with known results, and close and sweep their outputs."""
    encode_waiting(engine)
    keep_outputs(engine)


def add_output(engine: Engine, url: str, items: list[Item], spec: EncodingSpec = SPEC) -> None:
    """Make `url` the closed and swept output of a job with known results for these items."""
    encode(engine, submit(engine, items, spec=spec, output_url=url))
    keep_outputs(engine)
