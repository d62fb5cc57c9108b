"""Measure how well a model agrees with its reference, in each way that this machine can run it, and measure it again.

The reference is computed in a process of its own (worker/model/plain.py). The engine encodes the same texts
alone, together in batches, and together in a newly started model process. The texts have many scripts, and every
length from one token to beyond the window. A worker checks the model that it has loaded against its
certificate, if there is one.
"""

import importlib.util
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import file_digest
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from vectormill.corpus import take_evenly
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import ModelError, UnsupportedModel
from vectormill.domain.task import DENSE, RAW, VECTOR
from vectormill.jobs.item import join_pair
from vectormill.models.families import find_family
from vectormill.models.model_card import ModelCard
from vectormill.models.model_shape import ModelShape
from vectormill.models.registry import EncodingOptions, make_spec
from vectormill.models.specs import settle_spec
from vectormill.models.weights import find_weights, list_small_files, list_weight_files, list_weights
from vectormill.moments import format_moment
from vectormill.processes.lifetimes import open_child
from vectormill.settings import Settings
from worker.certificates.certificate import (
    Certificate,
    Circumstances,
    Closeness,
    Combination,
    Measurement,
    Method,
    Unmeasured,
    describe_changes,
    find_bound,
    find_breaches,
    find_changed_files,
    find_promise,
    make_measurement,
    name_certificate,
    read_certificate,
)
from worker.devices.backends import BACKENDS, SHARING
from worker.devices.detect import detect_inventory
from worker.devices.device import CPU, Device, Inventory, parse_devices
from worker.encoder.choice import (
    NUMPY,
    PACKED,
    PADDED,
    PRECISIONS,
    AttentionShape,
    choose_precision,
    choose_static_precision,
    find_packing_obstacle,
)
from worker.encoder.encoder import AUTO
from worker.engine.engine import KNOWN_TEXTS, Engine
from worker.engine.request import EncodeRequest, EncodeResult
from worker.placement.strategies import REPLICATE, SHARED
from worker.plan import find_shape, plan_worker
from worker.runner.starter import Sharing
from worker.settings import WorkerSettings, find_cache_dir, load_worker_settings
from worker.tokens.tokenizer import SAMPLE

logger = logging.getLogger(__name__)

SEED: Final = 25
# Reading longer texts in fp32 one at a time would take hours for some models; an option asks for them.
LONGEST_TOKENS: Final = 2048
MAX_TEXT_CHARS: Final = 1 << 30
TOP: Final = 10
SCRIPTS: Final = files("worker.certificates").joinpath("texts.txt")
NUM_SAMPLES: Final = 40
# Words of the longest text for each token that the model reads: no word has less than a token.
WORDS_PER_TOKEN: Final = 2
QUERY_CHARS: Final = 40
# Texts that are encoded alone, evenly taken of all: a model that is fully sharded takes half a second for each.
NUM_ALONE: Final = 48
ALONE: Final = "alone"
TOGETHER: Final = "in batches"
RESTARTED: Final = "in batches after a restart"
SENTENCE_TRANSFORMERS: Final = "sentence-transformers"
TRANSFORMERS: Final = "transformers"
# The libraries that compute.
LIBRARIES: Final = (
    "vectormill",
    *(backend.package for backend in BACKENDS.values()),
    "transformers",
    "tokenizers",
    "numpy",
)

# Called with what is done, and how much of it: done and total.
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Choices:
    """The ways to run a model that somebody wants measured; None means all that this machine has."""

    devices: str = AUTO
    precision: str | None = None
    backend: str | None = None
    strategy: str | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine as a certificate describes it: the settings of its workers, its devices, and their cache folder."""

    settings: WorkerSettings
    inventory: Inventory
    cache_dir: Path

    @classmethod
    def find(cls, settings: Settings) -> Self:
        return cls(load_worker_settings(), detect_inventory(), find_cache_dir(settings))


def certify(
    card: ModelCard, choices: Choices, max_tokens: int | None, machine: Machine, tell: Tell
) -> Certificate:
    """Measure every combination and return the certificate.

    Raises UnsupportedModel for a model without a reference, and ModelError if no combination can be measured.
    """
    spec = choose_spec(card, max_tokens)
    combinations = list(list_combinations(card, choices, machine.inventory))
    return measure(card, spec, SEED, combinations, machine, tell)


def choose_spec(card: ModelCard, max_tokens: int | None = None) -> EncodingSpec:
    """Return the spec in which a model is certified. Raise UnsupportedModel if it has neither vectors nor scores."""
    if card.is_extractor:
        raise UnsupportedModel(
            f"{card.name} extracts records, and there is no reference for them: its authors' code is not part of any "
            "library. No certificate can be measured for it."
        )
    if card.static is not None and card.static.is_model2vec:
        raise UnsupportedModel(
            f"{card.name} is a table of model2vec, whose authors' package is not installed with workers, and which "
            "sentence-transformers reads by other rules. No certificate can be measured for it."
        )
    if DENSE not in card.outputs:
        raise UnsupportedModel(
            f"{card.name} computes {', '.join(card.outputs)}, and a certificate compares dense vectors or scores. "
            "No certificate can be measured for it."
        )
    limit = min(card.max_tokens, LONGEST_TOKENS) if max_tokens is None else max_tokens
    activation = None if card.classifier is None else RAW
    return make_spec(card, EncodingOptions(max_tokens=limit, activation=activation))


def list_combinations(card: ModelCard, choices: Choices, inventory: Inventory) -> Iterator[Combination]:
    """Yield the ways in which this machine can run a model: backend, precision, attention and placement.

    Of equal devices only the first is measured. Raises ConfigurationError for unknown devices, and ModelError
    for a precision that a device would emulate, if it was asked for.
    """
    if card.static is not None:  # there is one way
        yield Combination(
            NUMPY, choose_static_precision(choices.precision or AUTO).value, AUTO, REPLICATE, CPU
        )
        return
    shape = find_shape(card)
    devices = parse_devices(choices.devices, inventory)
    for device in {each.description: each for each in reversed(devices)}.values():
        for precision in list_precisions(choices.precision, device, card.model_type):
            yield from _list_on(device, precision, shape, choices)
    # Two devices that can share a model: accelerators, or halves of the processor; empty if there are none.
    shared = ",".join(device.name for device in devices[:2]) if len(devices) > 1 else ""
    if not shared and devices[0].kind == CPU and choices.devices in (AUTO, CPU):
        shared = "cpu:0,cpu:1" if len(inventory.physical_cores) > 1 else ""
    if find_family(shape.model_type).layout is None or not shared:
        return
    for strategy in SHARED:
        if choices.strategy in (None, strategy) and choices.backend in (None, SHARING.name):
            for precision in list_precisions(choices.precision, devices[0], card.model_type):
                yield Combination(SHARING.name, precision, AUTO, strategy, shared)


def list_precisions(wanted: str | None, device: Device, model_type: str) -> list[str]:
    """Return the precisions in which a device computes such a model. Raise ModelError if it refuses the wanted one."""
    if wanted is not None:
        return [choose_precision(wanted, device, model_type).value]
    found = []
    for precision in PRECISIONS:
        try:
            found.append(choose_precision(precision, device, model_type).value)
        except ModelError:
            continue
    return found


def _list_on(device: Device, precision: str, shape: ModelShape, choices: Choices) -> Iterator[Combination]:
    if choices.strategy not in (None, REPLICATE):
        return
    attention = AttentionShape(shape.model_type, shape.head_size, padding_id=0)
    for backend in BACKENDS.values():
        is_there = importlib.util.find_spec(backend.package) is not None
        if choices.backend not in (None, backend.name) or not (backend.runs_on(device.kind) and is_there):
            continue
        name = CPU if device.kind == CPU else device.name
        yield Combination(backend.name, precision, PADDED, REPLICATE, name)
        if backend.has_packed_attention and not find_packing_obstacle(attention, device, precision):
            yield Combination(backend.name, precision, PACKED, REPLICATE, name)


def measure(
    card: ModelCard,
    spec: EncodingSpec,
    seed: int,
    combinations: Sequence[Combination],
    machine: Machine,
    tell: Tell,
) -> Certificate:
    """Measure these combinations; those that this machine cannot run become unmeasured.

    Raises ModelError if the reference cannot be computed, or if no combination can be measured.
    """
    texts = make_texts(spec, seed)
    known = [text.encode() for text in KNOWN_TEXTS]
    total = len(texts) + len(known)
    library, rows = compute_reference(
        card, spec, [*texts, *known], lambda done: tell("reference", done, total)
    )
    reference = rows[: len(texts)]
    measurements: list[Measurement] = []
    unmeasured: list[Unmeasured] = []
    lengths = np.zeros(0, dtype=np.int32)
    num_truncated = 0
    for number, combination in enumerate(combinations):
        tell(str(combination), number, len(combinations))
        try:
            found, result = measure_combination(card, spec, combination, texts, reference, seed, machine)
        except ModelError as error:
            unmeasured.append(Unmeasured(combination, str(error)))
            continue
        measurements.append(found)
        lengths, num_truncated = result.num_tokens, int(result.truncated.sum())
    if not measurements:
        raise ModelError(
            f"{card.name} cannot be measured here: "
            + (unmeasured[0].reason if unmeasured else "this machine has no such combination.")
        )
    return Certificate(
        model=card.name,
        spec=spec,
        files=digest_files(card),
        circumstances=describe_circumstances(machine.inventory, [each.combination for each in measurements]),
        method=Method(library, seed, len(texts), int(lengths.max()), num_truncated),
        measurements=measurements,
        unmeasured=unmeasured,
        measured_at=format_moment(datetime.now(UTC)),
        known={
            text: row.astype("<f4").tobytes().hex()
            for text, row in zip(KNOWN_TEXTS, rows[len(texts) :], strict=True)
        },
    )


def compute_reference(
    card: ModelCard, spec: EncodingSpec, texts: Sequence[bytes], tell: Callable[[int], None]
) -> tuple[str, NDArray[np.float32]]:
    """Return the reference's library and its results [n, dimensions], computed in a process of its own."""
    library = choose_library(card)
    rows = []
    with open_child() as pool:
        try:
            for number, text in enumerate(texts):
                rows.append(pool.submit(encode_here, card, spec, library, [text]).result())
                tell(number + 1)
        except BrokenProcessPool as error:
            raise ModelError(
                f"The process that computes the reference for {card.name} ended without an error message."
            ) from error
    return f"{library} {version(library)}", np.concatenate(rows)


def choose_library(card: ModelCard) -> str:
    """Return the library whose results are the reference.

    sentence-transformers reads `modules.json`. It is the authors' code for a model that has one; all others are
    run by transformers.
    """
    has_modules = (card.path / "modules.json").is_file()
    is_there = importlib.util.find_spec("sentence_transformers") is not None
    is_its_own = card.adapter is None and (card.classifier is None or card.classifier.template is not None)
    return SENTENCE_TRANSFORMERS if is_there and has_modules and is_its_own else TRANSFORMERS


def encode_here(
    card: ModelCard, spec: EncodingSpec, library: str, texts: Sequence[bytes]
) -> NDArray[np.float32]:
    """Encode the texts plainly in this process, which then has torch loaded."""
    from worker.model.plain import encode_plainly

    return encode_plainly(card, spec, library, texts)


def measure_combination(
    card: ModelCard,
    spec: EncodingSpec,
    combination: Combination,
    texts: Sequence[bytes],
    reference: NDArray[np.float32],
    seed: int,
    machine: Machine,
) -> tuple[Measurement, EncodeResult]:
    """Encode the texts in one combination, in every way, and compare them with the reference.

    Return also the result of encoding them together. Raises ModelError if the combination cannot be run.
    """
    chance = np.random.default_rng(seed)

    def encode(engine: Engine, order: Sequence[int]) -> EncodeResult:
        request = EncodeRequest("certificate", spec, [texts[place] for place in order], False, MAX_TEXT_CHARS)
        result = engine.encode(request, threading.Event())
        if result.failures:
            place, failure = next(iter(result.failures.items()))
            raise ModelError(f"Text {order[place]} got no result: {failure.detail}.")
        return result

    def compare(vectors: NDArray[np.float32], order: Sequence[int]) -> Closeness:
        each = find_agreement(spec, reference[order], vectors)
        return Closeness(float(each.min()), float(each.mean()))

    ways: dict[str, Closeness] = {}
    with run_engine(card, combination, machine) as engine:
        alone = take_evenly(range(len(texts)), NUM_ALONE)
        rows = np.concatenate([encode(engine, [place]).vectors for place in alone])
        ways[ALONE] = compare(rows, alone)
        order = chance.permutation(len(texts)).tolist()
        together = encode(engine, order)
        ways[TOGETHER] = compare(together.vectors, order)
        switches = engine.report().get("switches", ())
    with run_engine(card, combination, machine) as engine:
        again = chance.permutation(len(texts)).tolist()
        ways[RESTARTED] = compare(encode(engine, again).vectors, again)
    ranks = find_rank_agreement(spec, reference[order], together.vectors)
    promise = find_promise(spec, combination.precision, switches)
    return make_measurement(combination, ways, ranks, promise), together


@contextmanager
def run_engine(card: ModelCard, combination: Combination, machine: Machine) -> Iterator[Engine]:
    """Yield an engine that runs the model in this combination, and reuses no vectors."""
    inventory = machine.inventory
    chosen = machine.settings.model_copy(
        update={
            "backend": combination.backend,
            "precision": combination.precision,
            "attention": combination.attention,
            "strategy": combination.strategy,
            "devices": combination.devices,
            "reuse_bytes": 0,
        }
    )
    devices = {device.name: device for device in parse_devices(combination.devices, inventory)}
    sharing = None
    if combination.strategy != REPLICATE:
        replica = plan_worker(card, inventory, chosen).replicas[0]
        sharing = Sharing(replica, tuple(devices[name] for name in replica.devices))
    engine = Engine(card, next(iter(devices.values())), chosen, machine.cache_dir, sharing=sharing)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def find_agreement(
    spec: EncodingSpec, reference: NDArray[np.float32], found: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Return for each row the cosine of vectors, or 1 minus the largest difference of scores.

    The difference of scores above 1 is relative to the reference.
    """
    one, other = reference.astype(np.float64), found.astype(np.float64)
    if spec.result != VECTOR:
        differences = np.abs(one - other) / np.maximum(np.abs(one), 1.0)
        agreement: NDArray[np.float64] = 1 - differences.max(axis=1)
        return agreement
    products = np.einsum("nd,nd->n", one, other)
    cosines: NDArray[np.float64] = products / (np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1))
    return cosines


def find_rank_agreement(
    spec: EncodingSpec, reference: NDArray[np.float32], found: NDArray[np.float32]
) -> float:
    """Return the mean share of the ten best that two rankings have in common.

    Each text searches for its neighbours among all others; texts or pairs are ranked by the score of each
    label.
    """
    if spec.result == VECTOR:
        likeness = []
        for vectors in (reference, found):
            unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
            cosines = unit @ unit.T
            np.fill_diagonal(cosines, -np.inf)
            likeness.append(cosines)
    else:
        likeness = [scores.T for scores in (reference, found)]
    one, other = (np.argsort(-each, axis=1)[:, :TOP] for each in likeness)
    return float(np.mean([len(set(a) & set(b)) / TOP for a, b in zip(one, other, strict=True)]))


def digest_files(card: ModelCard) -> dict[str, str]:
    """Return the SHA-256 of each file that a model's results depend on, by its path within the model."""
    weights = find_weights(card.path, card.name) if card.static is None else list_weights(card.path)
    digests = {}
    for path in [*list_small_files(card.path), *list_weight_files(card.path, weights)]:
        with path.open("rb") as file:
            digests[path.relative_to(card.path).as_posix()] = file_digest(file, "sha256").hexdigest()
    return digests


def describe_circumstances(inventory: Inventory, combinations: Sequence[Combination]) -> Circumstances:
    """Return what results may depend on: the libraries, the processor and the devices in use."""
    used = {
        device.name: device.description
        for combination in combinations
        for device in parse_devices(combination.devices, inventory)
    }
    versions = {}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return Circumstances(versions, inventory.description, sorted(inventory.features), used)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The differences from a certificate: failures, and notes on circumstances, both as sentences.

    `found` is what was measured now; None if the model is another one, so that nothing was measured.
    """

    certified: Certificate
    found: Certificate | None
    notes: Sequence[str]
    failures: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        now = self.certified if self.found is None else self.found
        return {
            "model": self.certified.model,
            "is_as_certified": not self.failures,
            "failures": list(self.failures),
            "notes": list(self.notes),
            "method": now.to_json()["method"],
            "measurements": [] if self.found is None else self.found.to_json()["measurements"],
        }


def verify(certified: Certificate, card: ModelCard, machine: Machine, tell: Tell) -> Verdict:
    """Measure again and compare with the certified bounds.

    Nothing is measured if the model's files differ. Raises ModelError if this machine can measure nothing of
    it.
    """
    combinations = [each.combination for each in certified.measurements]
    failures = find_changed_files(certified, digest_files(card))
    revision, pooling = settle_spec(card, certified.spec).revision, "+".join(card.pooling)
    if (card.revision, pooling) != (revision, certified.spec.pooling):
        failures.append(
            f"{card.name} is registered as {card.revision} with {pooling} pooling, and was "
            f"{revision} with {certified.spec.pooling} pooling."
        )
    if failures:
        return Verdict(certified, None, (), failures)
    found = measure(card, certified.spec, certified.method.seed, combinations, machine, tell)
    notes = [f"Not measured here: {each.combination}: {each.reason}" for each in found.unmeasured]
    was = {each.combination: each for each in certified.measurements}
    now = describe_circumstances(machine.inventory, [each.combination for each in found.measurements])
    notes += describe_changes(certified.circumstances, now)
    if certified.method.reference != found.method.reference:
        notes.append(f"The reference is {found.method.reference} here, and was {certified.method.reference}.")
    failures = [
        breach for each in found.measurements for breach in find_breaches(was[each.combination], each)
    ]
    return Verdict(certified, found, notes, failures)


def find_certificate(data_dir: Path, card: ModelCard) -> Certificate | None:
    """Return the certificate of this model; None if there is none, or only one of another revision.

    Raises ConfigurationError if the file was damaged or edited.
    """
    path = name_certificate(data_dir, card.name)
    if not path.is_file():
        return None
    certificate = read_certificate(path)
    was = certificate.spec.revision
    if settle_spec(card, certificate.spec).revision != card.revision:
        logger.warning("%s is not used: it is of revision %s, and this is %s.", path, was, card.revision)
        return None
    return certificate


def check_loaded(engine: Engine, certificate: Certificate | None) -> str:
    """Encode the known texts, and return a note if their certificate has no measurement of this backend and precision.

    Raise ModelError if a result leaves the certified bounds, or what the precision promises where there are none.
    """
    if certificate is None:
        return ""
    texts = list(certificate.known)
    rows = [np.frombuffer(bytes.fromhex(each), dtype="<f4") for each in certificate.known.values()]
    encoded = [text.encode() for text in texts]
    request = EncodeRequest("certificate", certificate.spec, encoded, False, MAX_TEXT_CHARS)
    found = engine.encode(request, threading.Event())
    report = engine.report()
    backend, precision = report["backend"]["value"], report["precision"]["value"]
    bound = find_bound(certificate, backend, precision)
    agreement = find_agreement(certificate.spec, np.stack(rows), found.vectors)
    if not agreement.min() >= bound:
        raise ModelError(
            f"The model process is faulty: {texts[int(agreement.argmin())][:40]!r} agrees with the reference of the "
            f"certificate by {agreement.min():.5f}, and at least {bound:.5f} is certified. If the model was changed on "
            "purpose, certify it again."
        )
    logger.info("%s agrees with its certificate by %.5f.", certificate.model, agreement.min())
    certified = [each.combination for each in certificate.measurements]
    if any((each.backend, each.precision) == (backend, precision) for each in certified):
        return ""
    return f"its certificate has no measurement of {backend} {precision}: run `vectormill certify {certificate.model}`"


def make_texts(spec: EncodingSpec, seed: int) -> list[bytes]:
    """Return the texts for a spec, always the same for a seed; every other one is a pair if pairs are scored.

    All are pairs if the model reads nothing else.
    """
    scripts = [line for line in SCRIPTS.read_text(encoding="utf-8").split("\n") if line]
    english = [line for line in SAMPLE.read_text(encoding="utf-8").split("\n") if line]
    texts = [*scripts, *take_evenly(english, NUM_SAMPLES)]
    chance = random.Random(seed)  # noqa: S311 - chooses texts, and no secret
    for source in (scripts, english):
        length = 1
        while length <= WORDS_PER_TOKEN * spec.max_tokens:
            texts.append(take_words(source, length, chance))
            length *= 2
    texts.append(take_words(scripts, WORDS_PER_TOKEN * spec.max_tokens, chance))
    if spec.result == VECTOR:
        return [text.encode() for text in texts]
    if not spec.labels:  # queries with documents, of which only these are cut
        return [
            join_pair(texts[place - 1][:QUERY_CHARS].encode(), text.encode())
            for place, text in enumerate(texts)
        ]
    return [
        join_pair(text.encode(), texts[place - 1].encode()) if place % 2 else text.encode()
        for place, text in enumerate(texts)
    ]


def take_words(lines: list[str], num_words: int, chance: random.Random) -> str:
    """Return a text of so many words, made of lines in random order."""
    words: list[str] = []
    while len(words) < num_words:
        words += chance.choice(lines).split()
    return " ".join(words[:num_words])
