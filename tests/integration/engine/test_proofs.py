"""A model process whose weights change while it runs is found out, and what it computed since is encoded again."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from sqlalchemy import Engine, text

from scheduler.reaper import Recomputer
from tests.chunk_work import encode_all, encode_as
from tests.faulty_engine import MakeEngine, encode
from tests.models import DEVICE
from tests.protocol import submit
from tests.reference import TEXTS, known_vectors
from tests.sick_encoders import FAULT
from vectormill.jobs.export import read_results
from vectormill.jobs.item import Item
from vectormill.jobs.jobs import find_job
from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec
from worker.batching.batch import Batch
from worker.chunk.proving import Prover
from worker.encoder.encoder import Encoder, EncoderOrder
from worker.engine.engine import Engine as EncodingEngine
from worker.engine.request import EngineStopped
from worker.identity import WorkerIdentity
from worker.model.torch_encoder import TorchEncoder
from worker.settings import WorkerSettings


def load_flipping(order: EncoderOrder) -> Encoder:
    """Load the model with torch; the first batch after the file appears finds one weight changed.

    Its vectors are wrong, but finite and not zero: a text whose vector is none keeps its error when it is mended.
    """
    from worker.encoder.encoder import Choice

    encoder = TorchEncoder(order, Choice("torch", "for a test"), Choice("fp32", "for a test"), ())
    network, prepare = encoder._network, encoder.prepare

    def prepare_flipped(batch: Batch) -> object:
        fault = order.cache_dir / FAULT
        if fault.exists():
            fault.unlink()
            weight = network.transformer.encoder.layer[0].output.dense.weight.data
            weight[3, 5] *= 1e6
        return prepare(batch)

    encoder.prepare = prepare_flipped  # type: ignore[method-assign,assignment]
    return encoder


def test_a_sound_process_gives_proofs_between_batches_and_a_drifting_one_ends_the_engine(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine("tests.sick_encoders:DriftingEncoder")
    engine.start()
    texts = [f"text number {number}" for number in range(40)]
    before = encode(engine, texts).vectors
    for _ in range(3):
        assert engine.prove().result(timeout=30) == ""
        assert np.array_equal(encode(engine, texts).vectors, before)
    (tmp_path / FAULT).touch()
    flaw = engine.prove().result(timeout=30)
    assert flaw is not None
    assert "its vector has changed to a cosine of 0.99" in flaw
    with pytest.raises(EngineStopped):
        encode(engine, texts)
    assert not engine.is_healthy()
    assert "other results than when it was loaded" in engine.report()["state_reason"]


def test_a_process_that_replaces_another_is_compared_with_the_first(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """It may have read the weights from a damaged file."""
    import os
    import signal

    engine = make_engine("tests.sick_encoders:DriftingEncoder", max_runner_restarts=1)
    engine.start()
    encode(engine, ["a text"])
    (tmp_path / FAULT).touch()
    pid = engine.find_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineStopped, match="known text"):
        encode(engine, ["another text"])


@pytest.fixture
def real_engine(tmp_path: Path) -> Iterator[EncodingEngine]:
    card = Registry({}).card(DEFAULT_MODEL, weights=True)
    settings = WorkerSettings(backend="torch", precision="fp32", reuse_bytes=0)
    engine = EncodingEngine(
        card, DEVICE, settings, tmp_path, factory="tests.integration.engine.test_proofs:load_flipping"
    )
    engine.start()
    yield engine
    engine.stop()


def test_a_flipped_bit_in_the_weights_is_found_and_what_came_after_the_last_good_proof_is_encoded_again(
    engine: Engine, real_engine: EncodingEngine, tmp_path: Path
) -> None:
    spec = make_spec(Registry({}).card(DEFAULT_MODEL), EncodingOptions())
    identity = WorkerIdentity("flipped-cpu0@test", uuid4(), uuid4(), DEFAULT_MODEL, slots=4)
    ended: list[bool] = []
    prover = Prover(engine, real_engine, identity, 3600.0, lambda: ended.append(True))
    prover.start()
    jobs = []
    for number in range(3):
        if number == 2:
            (tmp_path / FAULT).touch()
        items = [Item(f"k{place}", TEXTS[place].encode()) for place in range(8 * number, 8 * number + 8)]
        jobs.append(submit(engine, items, spec=spec))
        results = encode_as(identity, engine, real_engine, read_period=prover.read_period)
        assert {result["outcome"] for result in results} == {"done"}
        if number < 2:
            assert prover.prove() == ""
    wrong = read(engine, jobs[2].id)
    flaw = prover.prove()
    assert flaw
    assert "cosine" in flaw or "not finite" in flaw
    assert ended == [True]
    with pytest.raises(EngineStopped, match="faulty"):
        prover.read_period()
    sound = [read(engine, job.id) for job in jobs[:2]]
    Recomputer(engine).recompute()
    states = []
    with engine.connect() as connection:
        for job in jobs:
            states.append(find_job(connection, job.id).state)
        done = connection.execute(
            text("SELECT count(*) FROM vectormill.proofs WHERE proven_at IS NOT NULL")
        ).scalar_one()
    assert states == ["completed", "completed", "queued"], "nothing but the job after the last good proof"
    assert done == 2
    card = Registry({}).card(DEFAULT_MODEL, weights=True)
    other = EncodingEngine(card, DEVICE, WorkerSettings(backend="torch", precision="fp32"), tmp_path)
    other.start()
    try:
        encode_all(engine, other, DEFAULT_MODEL)
    finally:
        other.stop()
    mended = read(engine, jobs[2].id)
    assert not np.allclose(mended, wrong, atol=1e-3), "the fault had changed the vectors"
    assert [read(engine, job.id).tobytes() for job in jobs[:2]] == [each.tobytes() for each in sound]
    assert np.allclose(mended, known_vectors(TEXTS[16:24]), atol=1e-4)


def read(engine: Engine, job_id: object) -> np.ndarray:
    return np.concatenate([block.results for block in read_results(engine, job_id)])  # type: ignore[arg-type]
