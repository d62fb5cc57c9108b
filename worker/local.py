"""LocalEncoder encodes texts in the process that calls it, with one engine on one device.

It needs neither Postgres nor Redis, and knows nothing of jobs. It is for programs that distribute the texts
themselves, such as Ray, Daft and Spark (vectormill/integrations).
"""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Final, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.encoding import DEFAULT_MODEL, EncodingSpec, OptionArguments
from vectormill.domain.errors import ConfigurationError, InvalidOption, ModelError
from vectormill.domain.task import VECTOR
from vectormill.domain.vector_type import VectorType
from vectormill.jobs.item import CRASHED_WORKER, ITEM_ERROR_CODES, ItemFailure
from vectormill.models.registry import EncodingOptions, make_spec, open_registry
from vectormill.models.suggestions import find_need
from vectormill.rows.values import encode_text
from vectormill.settings import load_settings
from vectormill.vectors.quantization import Ranges
from vectormill.vectors.vector_types import (
    Rows,
    find_vector_failures,
    make_rows,
    missing_rows,
)
from worker.chunk.calibrator import measure_space
from worker.devices.detect import detect_inventory
from worker.devices.device import CPU, Device, Inventory, parse_devices, split_processor
from worker.encoder.encoder import AUTO
from worker.engine.engine import KNOWN_TEXT, Engine
from worker.engine.request import EncodeRequest, EncodeResult, EngineStopped, RunnerDied
from worker.settings import find_cache_dir, load_worker_settings

logger = logging.getLogger(__name__)

# The number of texts in one request to the engine. Batches are made of all requests that are waiting, so this
# only decides how early the first batch starts, and how many threads can tokenize at the same time.
GROUP_TEXTS: Final = 256


@dataclass(frozen=True, slots=True)
class EncodedVectors:
    """The vectors of n texts, in the order of the texts.

    `vectors` has a row for each text: float32, float16 or int8 [n, dimensions], or uint8 [n, dimensions / 8
    rounded up] of packed bits, as `vector_type` asks. `failures` has the reason for each text without a vector,
    by its position. The row of such a text is NaN, or zeros in a type without NaN; its token count is 0.
    `num_tokens` counts what the model has read of a text, special tokens included. `truncated` says which texts
    were longer than that.
    """

    vectors: Rows
    failures: Mapping[int, ItemFailure]
    num_tokens: NDArray[np.int32]  # [n]
    truncated: NDArray[np.bool_]  # [n]

    def reasons(self) -> list[str | None]:
        """Return for each text why it has no vector, as "code: detail"; None for a text that has one."""
        reasons: list[str | None] = [None] * len(self.vectors)
        for position, failure in self.failures.items():
            reasons[position] = f"{failure.code}: {failure.detail}"
        return reasons


class LocalEncoder:
    """An encoder of one model on one device of this machine, loaded when it is made and used until it is closed.

    Vectors are the same as those of a job with this model and these options. Any number of threads may call
    `encode`. The model runs in a process of its own, which ends with this one.

    `model` is a name registered in VECTORMILL_MODELS, a directory, or `owner/name` on the Hugging Face hub.
    `device` is "auto" (the first accelerator that this process may see, or else the CPU), "cpu", or a name such
    as "cuda:1". On a CPU the encoder uses `num_cores` physical cores, by default all that this process may use.
    `options` are those of EncodingOptions. Everything else is a setting of the environment, as for a worker
    (docs/CONFIGURATION.md).

    Raises UnknownModel, InvalidOption, ConfigurationError, and ModelError if the model cannot be loaded.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        device: str = AUTO,
        num_cores: int | None = None,
        **options: Unpack[OptionArguments],
    ) -> None:
        settings = load_settings()
        worker_settings = load_worker_settings()
        wanted = EncodingOptions(**options)
        card = open_registry(settings, model).card(model, weights=True, need=find_need(wanted))
        self.spec = make_spec(card, wanted)
        if self.spec.result != VECTOR:
            raise InvalidOption(
                f"{model} with these options gives {self.spec.result}s, and a LocalEncoder gives vectors; submit a job."
            )
        self._max_text_chars = settings.max_text_chars
        self._kind: VectorType = self.spec.delivered_type
        self._numbers = count(1)
        if device == AUTO and card.static is not None:  # no GPU is faster
            device = CPU
        self.device: Device = choose_device(device, detect_inventory(), num_cores)
        self._engine = Engine(card, self.device, worker_settings, find_cache_dir(settings))
        self._engine.start()
        # The model process is also ended when this object is forgotten, or when the interpreter exits.
        self._end = weakref.finalize(self, self._engine.stop)
        if not self._engine.report().get("gives_vectors", True):
            self._end()
            raise ModelError(
                f"{model} gives weights of words, and a LocalEncoder gives vectors of one length."
            )
        self._threads = ThreadPoolExecutor(worker_settings.slots, thread_name_prefix="encode")
        # The ranges of codes are measured on the same texts as by a worker.
        self._ranges = (
            measure_space(self.spec, self._engine.encode, threading.Event())
            if self._kind.has_ranges
            else None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def width(self) -> int:
        """Return the number of values in a row."""
        return self._kind.width(self.spec.dimensions)

    def is_healthy(self) -> bool:
        """Return True unless the encoder was closed, or has lost its model process too often."""
        return self._engine.is_healthy()

    def report(self) -> dict[str, Any]:
        """Return what runs here, why, and how fast, as a worker reports it."""
        return self._engine.report()

    def close(self) -> None:
        """End the model process. A later `encode` raises ModelError."""
        self._end()
        self._threads.shutdown()

    def encode(self, texts: Sequence[Any]) -> EncodedVectors:
        """Encode all texts and return their vectors in the same order. None, NaN and NA count as an empty text.

        Other values than texts become texts as those of a source do (vectormill/rows/values.py).

        A text that cannot be encoded has a reason in `failures` instead of a vector, and does not affect the
        others. Raises ModelError if the encoder is closed or has lost its model process too often.
        """
        if not self._end.alive:
            raise ModelError("This LocalEncoder was closed; make another one.")
        num_texts = len(texts)
        groups = [
            range(start, min(start + GROUP_TEXTS, num_texts)) for start in range(0, num_texts, GROUP_TEXTS)
        ]
        answer = Answer(num_texts, self.spec, self._kind, self._ranges)
        cancelled = threading.Event()
        encode_group = partial(self._encode_group, texts, cancelled=cancelled)
        suspects: list[range] = []
        try:
            for group, result in zip(groups, self._threads.map(encode_group, groups), strict=True):
                if result is None:
                    suspects.append(group)
                else:
                    answer.write(group, result)
            self._encode_suspects(suspects, encode_group, answer)
        except EngineStopped as error:
            reason = self._engine.report()["state_reason"].rstrip(".")
            raise ModelError(f"{self.spec.model} cannot be used here any more: {reason}.") from error
        finally:
            cancelled.set()  # if one group has raised, the others are not waited for
        return answer.finish()

    def _encode_group(
        self, texts: Sequence[Any], group: range, *, cancelled: threading.Event
    ) -> EncodeResult | None:
        """Encode the texts at these positions. Return None if the model process died with some of them."""
        encoded = [encode_text(texts[place]) for place in group]
        request = EncodeRequest(
            "local", self.spec, encoded, interactive=False, max_text_chars=self._max_text_chars
        )
        try:
            return self._engine.encode(request, cancelled)
        except RunnerDied as error:
            logger.warning("%d texts are encoded again: %s", len(group), error)
            return None

    def _encode_suspects(
        self,
        suspects: Iterable[range],
        encode_group: Callable[[range], EncodeResult | None],
        answer: "Answer",
    ) -> None:
        """Encode the halves of groups in which the model process died, one at a time, until single texts are to blame.

        A text is to blame if the process died while it encoded nothing else.
        """
        waiting = deque(half for group in suspects for half in halve(group))
        while waiting:
            # The engine gives up after several deaths without a vector between them. This harmless text is another one
            # each time, because the vectors of recent texts are not computed again.
            text = f"{KNOWN_TEXT} ({next(self._numbers)})"
            self._encode_group([text], range(1), cancelled=threading.Event())
            group = waiting.popleft()
            result = encode_group(group)
            if result is not None:
                answer.write(group, result)
            elif len(group) == 1:
                answer.fail(group.start, CRASHED_WORKER)
            else:
                waiting += halve(group)


class Answer:
    """The rows of one call of LocalEncoder.encode, while they are filled in. Used by one thread."""

    def __init__(self, num_texts: int, spec: EncodingSpec, kind: VectorType, ranges: Ranges | None) -> None:
        self._kind = kind
        self._ranges = ranges
        self._rows = missing_rows(num_texts, kind, spec.dimensions)
        self._failures: dict[int, ItemFailure] = {}
        self._num_tokens = np.zeros(num_texts, dtype=np.int32)
        self._truncated = np.zeros(num_texts, dtype=np.bool_)

    def write(self, group: range, result: EncodeResult) -> None:
        """Write the result of the texts at these positions."""
        here = slice(group.start, group.stop)
        self._num_tokens[here] = result.num_tokens
        self._truncated[here] = result.truncated
        for place, failure in result.failures.items():
            self._failures[group.start + place] = failure
        vectors = result.vectors
        is_sound = np.ones(len(group), dtype=np.bool_)
        is_sound[list(result.failures)] = False
        for place, failure in find_vector_failures(vectors, self._kind).items():
            self._failures.setdefault(group.start + place, failure)
            is_sound[place] = False
        self._rows[here][is_sound] = make_rows(vectors[is_sound], self._kind, self._ranges)

    def fail(self, place: int, code: str) -> None:
        """Note why the text at this position has no vector."""
        self._failures[place] = ItemFailure(code, ITEM_ERROR_CODES[code])

    def finish(self) -> EncodedVectors:
        """Return what was written."""
        failures = dict(sorted(self._failures.items()))
        return EncodedVectors(self._rows, failures, self._num_tokens, self._truncated)


def halve(group: range) -> tuple[range, ...]:
    """Return the two halves of a group; a group of one text cannot be halved."""
    middle = (group.start + group.stop) // 2
    halves = (range(group.start, middle), range(middle, group.stop))
    return halves if len(group) > 1 else (group,)


def choose_device(name: str, inventory: Inventory, num_cores: int | None = None) -> Device:
    """Return the device with this name; for "auto" the first accelerator, or else the whole CPU.

    A CPU of `num_cores` cores is not pinned to any of them, because other processes use the rest of the machine,
    and nobody has said which. Raises ConfigurationError with the devices that exist.
    """
    if name == AUTO and inventory.accelerators:
        return replace(inventory.accelerators[0], reason="it is the first GPU")
    if name not in (AUTO, CPU):
        devices = parse_devices(name, inventory)
        if "," in name:
            raise ConfigurationError(f"A LocalEncoder uses one device, and {name!r} are {len(devices)}.")
        return devices[0]
    whole = split_processor(inventory, 1)[0]
    whole = replace(whole, reason="no GPU was found" if name == AUTO else whole.reason)
    if num_cores is None or num_cores >= whole.num_threads:
        return whole
    if num_cores < 1:
        raise ConfigurationError(f"num_cores must be at least 1, not {num_cores}.")
    return replace(whole, cores=(), num_threads=num_cores)
