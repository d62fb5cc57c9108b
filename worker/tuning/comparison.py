"""Compare ways of running a model: each is verified against the first and timed. Starts no process itself."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.encoder import EncoderReport
from worker.encoder.way import Way
from worker.tuning.trial import TrialFailed

# A pass lasts at least so long, so that the first batches, which nothing is queued behind, count little.
PASS_SECONDS: Final = 0.25
# Each length is timed so many times, and the fastest pass counts: whatever else uses the device makes others slower.
NUM_PASSES: Final = 7
# A way that takes another backend or switches has to gain so much over a simpler one.
LEAST_GAIN: Final = 1.01


class RunningModel(Protocol):
    """A model that is loaded in some way and takes batches, as `worker.tuning.trial.Trial` is."""

    report: EncoderReport

    def encode(self, batches: Sequence[Batch]) -> list[Ragged]: ...

    def measure(self, batches: Sequence[Batch]) -> float: ...


@dataclass(frozen=True, slots=True)
class Workload:
    """Batches of texts of one length, in tokens. Repeated, they are the work of a pass."""

    length: int
    batches: tuple[Batch, ...]

    @property
    def num_tokens(self) -> int:
        return sum(batch.num_tokens for batch in self.batches)


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about a way: tokens per second for each length, or why it cannot be used."""

    way: Way
    tokens_per_second: tuple[float, ...] = ()
    flaw: str = ""

    def compare(self, other: "Finding") -> float:
        """Return how many times as fast as another way this one is, as the geometric mean of all lengths."""
        pairs = zip(self.tokens_per_second, other.tokens_per_second, strict=True)
        return math.exp(statistics.fmean(math.log(own / its) for own, its in pairs))


# Starts a model that runs in this way.
OpenTrial = Callable[[Way], AbstractContextManager[RunningModel]]
# Returns what is wrong with results of the known texts, given those of the first way; empty if nothing is.
FindFlaw = Callable[[Ragged, Ragged, EncoderReport], str]


def compare_ways(
    ways: Sequence[Way],
    open_trial: OpenTrial,
    known: Batch,
    workloads: Sequence[Workload],
    find_flaw: FindFlaw,
    clock: Callable[[], float] = time.monotonic,
    most_seconds: float = math.inf,
) -> tuple[Finding, ...]:
    """Try each way and return what was found, in their order.

    Results of the batch `known` are compared with those of the first way. A way that fails, whose results differ or
    that is not used as asked has its reason instead of rates. No way is begun after `most_seconds`.

    Raise TrialFailed if the first way fails.
    """
    started = clock()
    findings: list[Finding] = []
    expected: Ragged | None = None
    for way in ways:
        if findings and clock() - started > most_seconds:
            findings.append(Finding(way, flaw=f"there was no time left after {most_seconds:g} s"))
            continue
        try:
            with open_trial(way) as model:
                if flaw := _find_refusal(way, model.report):
                    raise TrialFailed(flaw)
                results = model.encode([known])[0]
                if expected is None:
                    expected = results
                elif flaw := find_flaw(results, expected, model.report):
                    raise TrialFailed(f"its results differ: {flaw}")
                findings.append(Finding(way, tuple(_measure(model, each) for each in workloads)))
        except TrialFailed as error:
            if not findings:
                raise
            findings.append(Finding(way, flaw=str(error)))
    return tuple(findings)


def choose_best(findings: Sequence[Finding]) -> Finding:
    """Return the fastest way; of ways that hardly differ from it, the first."""
    usable = [finding for finding in findings if not finding.flaw]
    fastest = max(usable, key=lambda finding: finding.compare(usable[0]))
    return next(finding for finding in usable if fastest.compare(finding) < LEAST_GAIN)


def _find_refusal(way: Way, report: EncoderReport) -> str:
    """Return why the model does not run in the way that was asked for; empty if it does."""
    if report.backend.value != way.backend:
        return f"{report.backend.value} runs instead: {report.backend.reason}"
    missing = [switch for switch in way.switches if switch not in report.switches]
    if not missing:
        return ""
    notes = [note for note in report.notes if any(f" {switch} " in note for switch in missing)]
    return " ".join(notes).rstrip(".") or f"{', '.join(missing)} was turned off"


def _measure(model: RunningModel, workload: Workload) -> float:
    """Return the tokens per second that a model computes of a workload."""
    seconds = model.measure(workload.batches)  # the first pass also compiles, or allocates memory
    seconds = model.measure(workload.batches)
    repeated = workload.batches * max(1, math.ceil(PASS_SECONDS / max(seconds, 1e-6)))
    num_tokens = sum(batch.num_tokens for batch in repeated)
    return num_tokens / min(model.measure(repeated) for _ in range(NUM_PASSES))
