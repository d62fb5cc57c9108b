"""Certificate: how well a model agrees with its authors' code on one machine, as a JSON file.

It is plain JSON with a digest of its own content, which shows that a file was damaged or edited; it has no
signature. This module reads, writes and compares certificates, and measures nothing.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import ConfigurationError
from vectormill.domain.task import MULTI_VECTOR, VECTOR
from vectormill.files.outputs import open_replacement
from worker.encoder.choice import FP32, INT8
from worker.placement.strategies import REPLICATE
from worker.tasks.finishing import PROMISE_FP32, SMALLEST_COSINE, find_least_cosine

FORMAT: Final = "vectormill certificate 1"
FOLDER: Final = "certificates"
# The least cosine of vectors from 8-bit weights with those from fp32 weights: rounding makes another model.
PROMISE_INT8: Final = 0.998
# The least agreement of scores, sparse weights and confidences in 16 bit and with compressed weights, as for samples
# of runs.
PROMISE_OF_SCORES: Final = 0.98
# How much less the rankings may agree when they are measured again: near ties change places.
RANK_MARGIN: Final = 0.02


@dataclass(frozen=True, slots=True)
class Combination:
    """One way to run a model: a backend, a precision, an attention, and a placement on devices.

    `devices` are written as in the setting, such as cpu:0,cpu:1.
    """

    backend: str
    precision: str
    attention: str
    strategy: str
    devices: str

    def __str__(self) -> str:
        attention = "" if self.strategy != REPLICATE else f" {self.attention},"
        return f"{self.backend} {self.precision},{attention} {self.strategy} on {self.devices}"


@dataclass(frozen=True, slots=True)
class Closeness:
    """The smallest and mean agreement of all texts, encoded in one way."""

    smallest: float
    mean: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """The agreement of one combination with the reference, for each way in which texts were encoded.

    Closeness is the cosine of vectors, and 1 minus the largest difference of scores. `rank_agreement` is the
    share of the ten best that both rankings have. `promise` is what the precision promises. The results are
    expected to stay above `bound` and `rank_bound` on other machines.
    """

    combination: Combination
    ways: Mapping[str, Closeness]
    rank_agreement: float
    promise: float
    bound: float
    rank_bound: float

    @property
    def smallest(self) -> float:
        return min(way.smallest for way in self.ways.values())

    @property
    def mean(self) -> float:
        return sum(way.mean for way in self.ways.values()) / len(self.ways)

    @property
    def keeps_promise(self) -> bool:
        return self.smallest >= self.promise

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "smallest": self.smallest, "mean": self.mean}


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """A combination that could not be measured, and why."""

    combination: Combination
    reason: str


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The circumstances that results depend on besides the model: versions of libraries, processor and devices."""

    libraries: Mapping[str, str]
    processor: str
    features: Sequence[str]
    devices: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Method:
    """How the agreement was measured. `longest_tokens` is the longest text as the model read it."""

    reference: str
    seed: int
    num_texts: int
    longest_tokens: int
    num_truncated: int


@dataclass(frozen=True, slots=True)
class Certificate:
    """The measurements of one model, with all that they depend on.

    `files` has the SHA-256 of each file of the model that results depend on: weights, tokenizer and
    configuration. `known` has the reference's results for the texts by which workers prove themselves, each as the
    hexadecimal digits of little-endian float32 numbers.
    """

    model: str
    spec: EncodingSpec
    files: Mapping[str, str]
    circumstances: Circumstances
    method: Method
    measurements: Sequence[Measurement]
    unmeasured: Sequence[Unmeasured]
    measured_at: str
    known: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the content with its digest."""
        content = {
            "format": FORMAT,
            **asdict(self),
            "spec": self.spec.to_json(),
            "measurements": [each.to_json() for each in self.measurements],
        }
        return {**content, "digest": digest_content(content)}


PARTS: Final[Mapping[str, Any]] = {
    "circumstances": Circumstances,
    "method": Method,
    "measurements": list[Measurement],
    "unmeasured": list[Unmeasured],
}


def digest_content(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON in canonical form: keys sorted, no spaces."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def name_certificate(data_dir: Path, model: str) -> Path:
    """Return the file in which the certificate of a model is written, and where its workers look for it."""
    name = re.sub(r"[^\w.-]+", "--", model).strip("-.")
    return data_dir.expanduser() / FOLDER / f"{name}.json"


def find_newest(data_dir: Path) -> Path:
    """Return the certificate that was written last. Raise ConfigurationError if there is none."""
    folder = data_dir.expanduser() / FOLDER
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ConfigurationError(
            f"There is no certificate in {folder}; write one with `vectormill certify MODEL`."
        )
    return files[-1]


def write_certificate(certificate: Certificate, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_replacement(path) as file:
        file.write(json.dumps(certificate.to_json(), indent=2, ensure_ascii=False).encode() + b"\n")


def read_certificate(path: Path) -> Certificate:
    """Return the certificate in a file. Raise ConfigurationError if it is another file, or was changed."""
    try:
        content = json.loads(path.read_bytes())
        if content.pop("format") != FORMAT:
            raise ValueError("it has another format")
        digest = content.pop("digest")
        if digest != digest_content({"format": FORMAT, **content}):
            raise ValueError("its content was changed after it was written, so its digest is another")
        content |= {name: msgspec.convert(content[name], kind) for name, kind in PARTS.items()}
        return Certificate(**{**content, "spec": EncodingSpec.from_json(content["spec"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path} is no certificate that this release can read: {error}.") from error


def find_promise(spec: EncodingSpec, precision: str, switches: Sequence[str] = ()) -> float:
    """Return the least agreement with the reference that a precision promises.

    Of several outputs each has its own, so the spec has one of them.
    """
    if precision == FP32:
        return PROMISE_FP32
    if spec.outputs == MULTI_VECTOR:
        return SMALLEST_COSINE
    if spec.result != VECTOR:
        return PROMISE_OF_SCORES
    if precision == INT8 and "fp8" not in switches:
        return PROMISE_INT8
    return find_least_cosine(precision, switches)


def find_bound(certificate: Certificate, backend: str, precision: str) -> float:
    """Return the least agreement certified for a backend and a precision, or else what the precision promises."""
    bounds = [
        each.bound
        for each in certificate.measurements
        if (each.combination.backend, each.combination.precision) == (backend, precision)
    ]
    return min(bounds, default=find_promise(certificate.spec, precision))


def make_measurement(
    combination: Combination, ways: Mapping[str, Closeness], rank_agreement: float, promise: float
) -> Measurement:
    """Return the measurement with its bounds: the promise, or what was measured if that is less."""
    smallest = min(way.smallest for way in ways.values())
    bound = min(promise, math.floor(smallest * 1e5) / 1e5)
    return Measurement(
        combination, ways, rank_agreement, promise, bound, max(0.0, rank_agreement - RANK_MARGIN)
    )


def find_changed_files(certificate: Certificate, files: Mapping[str, str]) -> list[str]:
    """Return a sentence for each file of the model that differs from the one that was certified."""
    was = certificate.files
    told = {
        name: "is missing" if name not in files else "is new" if name not in was else "has another content"
        for name in sorted(was.keys() | files.keys())
        if was.get(name) != files.get(name)
    }
    return [f"The file {name} of {certificate.model} {flaw}." for name, flaw in told.items()]


def describe_changes(was: Circumstances, now: Circumstances) -> Iterator[str]:
    """Yield a sentence for each difference that explains other results but is no failure in itself."""
    for name in sorted(was.libraries.keys() | now.libraries.keys()):
        before, after = was.libraries.get(name), now.libraries.get(name)
        if before != after:
            yield f"{name} is {after or 'not installed'} here, and was {before or 'not installed'}."
    if was.processor != now.processor or list(was.features) != list(now.features):
        yield f"The processor is {now.processor} here, and was {was.processor}."
    if dict(was.devices) != dict(now.devices):
        yield f"The devices are {_list_devices(now)} here, and were {_list_devices(was)}."


def _list_devices(circumstances: Circumstances) -> str:
    return ", ".join(f"{name} ({what})" for name, what in circumstances.devices.items())


def find_breaches(certified: Measurement, found: Measurement) -> Iterator[str]:
    """Yield a sentence for each bound of a certified combination that is not kept any more."""
    for way, agreement in found.ways.items():
        if agreement.smallest < certified.bound:
            yield (
                f"{certified.combination}: texts encoded {way} agree with the reference by {agreement.smallest:.5f}, "
                f"below the certified {certified.bound:.5f}."
            )
    if found.rank_agreement < certified.rank_bound:
        yield (
            f"{certified.combination}: rankings share {found.rank_agreement:.1%} of their ten best, below the "
            f"certified {certified.rank_bound:.1%}."
        )
