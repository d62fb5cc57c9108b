"""An engine whose encoder raises, dies, hangs or returns nonsense on request: real processes, no model.

The encoder computes vectors from the token ids, and fails when it sees certain words.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import ModelError
from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor
from worker.encoder.encoder import Choice, DeviceLost, DirectEncoder, EncoderOrder, EncoderReport
from worker.engine.engine import Engine
from worker.engine.request import EncodeRequest, EncodeResult
from worker.settings import WorkerSettings

CARD = Registry({}).card(DEFAULT_MODEL)
SPEC = make_spec(CARD, EncodingOptions(normalize=False))
# Token ids in the packaged model's vocabulary.
ERROR, CRASH, HANG, NAN, LOST = 7561, 5823, 6865, 16660, 2439  # "error" "crash" "hang" "nan" "lost"
ZERO = 5717  # "zero": the vector is zero
LATER = 2101  # "later": fail only after the hold has ended, not at once
HANG_WHILE_FILE_EXISTS = "hold"
LONGEST_HOLD_SECONDS = 60.0


class FaultyEncoder(DirectEncoder):
    """An encoder whose vector for a sequence depends on its token ids alone, not on the rest of the batch.

    Certain token ids make it exit, hang, raise or return NaN or zero.
    """

    def __init__(self, order: EncoderOrder, num_streams: int = 1) -> None:
        self._order = order
        self._num_streams = num_streams

    def encode(self, batch: Batch) -> Ragged:
        if np.isin(LATER, batch.input_ids):
            self._wait_while_held()
        if np.isin(CRASH, batch.input_ids):
            os._exit(7)
        if np.isin(HANG, batch.input_ids):
            time.sleep(3600)  # hangs until the engine ends the process
        if np.isin(LOST, batch.input_ids):
            raise DeviceLost("an illegal memory access")
        if np.isin(ERROR, batch.input_ids):
            raise ValueError("a sequence the model cannot take")
        self._wait_while_held()
        vectors = np.empty((len(batch), self._order.card.dimension), dtype=np.float32)
        for row, ids in enumerate(np.split(batch.input_ids, np.cumsum(batch.lengths)[:-1])):
            vectors[row] = np.nan if NAN in ids else np.resize(ids, vectors.shape[1]) * (ZERO not in ids)
        return Ragged.from_matrix(vectors)

    def _wait_while_held(self) -> None:
        """Wait while the test holds the encoder by a file, for at most LONGEST_HOLD_SECONDS.

        The limit is for a test that fails before it removes the file, and then waits for its threads.
        """
        end = time.monotonic() + LONGEST_HOLD_SECONDS
        while (self._order.cache_dir / HANG_WHILE_FILE_EXISTS).exists() and time.monotonic() < end:
            time.sleep(0.01)  # the test ends the wait from another process, by removing the file

    def describe(self) -> EncoderReport:
        choice = Choice("fake", "for tests")
        return EncoderReport(choice, choice, choice, "none", 1, 0.0, num_streams=self._num_streams)


load_two_streams = partial(FaultyEncoder, num_streams=2)


def load_nothing(order: EncoderOrder) -> FaultyEncoder:
    raise ModelError("There is no such model; make one.")


def die_while_loading(order: EncoderOrder) -> FaultyEncoder:
    os._exit(3)


MakeEngine = Callable[..., Engine]


@contextmanager
def making_engines(directory: Path) -> Iterator[MakeEngine]:
    """Yield a function that makes engines with their files in `directory`.

    At the end all engines are stopped, and no runner process may be left.
    """
    engines: list[Engine] = []

    def make(function: str = "FaultyEncoder", **settings: Any) -> Engine:
        engine = Engine(
            CARD,
            split_processor(detect_inventory(), 1)[0],
            # No vectors are reused unless a test asks for it: repeated words must reach the model again.
            WorkerSettings(**{"max_batch_tokens": 64, "reuse_bytes": 0, **settings}),
            directory,
            factory=function if ":" in function else f"tests.faulty_engine:{function}",
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.stop()
    assert runner_pids() == []


def allow_passes(engine: Engine, seconds: float) -> None:
    """Set how many seconds a forward pass of this engine may take from now on."""
    executor = engine._executor
    executor._settings = executor._settings.model_copy(update={"forward_timeout_seconds": seconds})


def be_patient(engine: Engine) -> None:
    """Allow forward passes of 300 s from now on.

    What a test checks after a hang then does not depend on the machine's speed.
    """
    allow_passes(engine, 300.0)


def runner_pids() -> list[int]:
    return [
        child.pid for child in psutil.Process().children() if "runner_process" in " ".join(child.cmdline())
    ]


def request(texts: list[str], *, spec: EncodingSpec = SPEC, interactive: bool = False) -> EncodeRequest:
    return EncodeRequest("r", spec, [text.encode() for text in texts], interactive, 1000)


def encode(engine: Engine, texts: list[str], **options: Any) -> EncodeResult:
    return engine.encode(request(texts, **options), threading.Event())
