"""Calibrator makes sure that the ranges of an int8 space are known before its first vector is stored.

The ranges are measured on texts that come with Vectormill, not on a job's own texts. So they do not depend on
which job or chunk came first, and the same text gets the same codes everywhere. The calibrator knows nothing
about chunks.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from typing import Final

from sqlalchemy import Engine

from vectormill.collections.generation_tables import find_ranges, keep_ranges
from vectormill.domain.encoding import TRUNCATE, EncodingSpec
from vectormill.domain.errors import ModelError
from vectormill.vectors.quantization import Ranges, measure_ranges, widen_ranges
from worker.engine.request import EncodeRequest, EncodeResult

logger = logging.getLogger(__name__)

SAMPLE_FILE: Final = "calibration_texts.txt"
MAX_TEXT_CHARS: Final = 10_000
# The range is widened by this share at either end, because other texts have values outside the sample's
# range. Measured on docstrings, with a fifth 1 value in 2,000 is outside and the mean cosine to float32 is
# 0.99994; without it, 1 in 100 and 0.9991.
MARGIN_SHARE: Final = 0.2


class Calibrator:
    """Measures the ranges of an int8 space once; the first worker that needs them does so. Thread-safe.

    `encode` is the method of the engine.
    """

    def __init__(
        self, database: Engine, encode: Callable[[EncodeRequest, threading.Event], EncodeResult]
    ) -> None:
        self._database = database
        self._encode = encode
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def prepare(self, spec: EncodingSpec, cancelled: threading.Event) -> None:
        """Measure and store the ranges of the spec's space unless they are stored.

        Do nothing for a spec without ranges. Raises what the engine raises, and ModelError if the sample gets
        no vectors.
        """
        if not spec.kept_type.has_ranges or spec.fingerprint() in self._known:
            return
        with self._lock:
            if spec.fingerprint() in self._known:
                return
            with self._database.connect() as connection:
                is_stored = find_ranges(connection, spec) is not None
            if not is_stored:
                ranges = measure_space(spec, self._encode, cancelled)
                with self._database.begin() as connection:
                    keep_ranges(connection, spec, ranges)
                logger.info(
                    "Measured the %s ranges of %s %s (%s).",
                    spec.vector_type,
                    spec.model,
                    spec.revision,
                    spec.fingerprint(),
                )
            self._known.add(spec.fingerprint())


def measure_space(
    spec: EncodingSpec,
    encode: Callable[[EncodeRequest, threading.Event], EncodeResult],
    cancelled: threading.Event,
) -> Ranges:
    """Return the ranges of the spec's space, measured on the sample.

    Raises what `encode` raises, and ModelError if the sample gets no vectors.
    """
    texts = read_sample()
    request = EncodeRequest(
        request_id=f"calibration/{spec.fingerprint()}",
        spec=replace(spec, long_texts=TRUNCATE),
        texts=texts,
        interactive=False,
        max_text_chars=MAX_TEXT_CHARS,
    )
    result = encode(request, cancelled)
    sound = [position for position in range(len(texts)) if position not in result.failures]
    if not sound:
        raise ModelError(f"Cannot calibrate int8: model {spec.model} returned no vector for any sample text.")
    return widen_ranges(measure_ranges(result.vectors[sound]), MARGIN_SHARE)


def read_sample() -> list[bytes]:
    """Return the texts of the sample, one for each line of its file."""
    content = files("worker").joinpath(SAMPLE_FILE).read_bytes()
    return [line for line in content.splitlines() if line]
