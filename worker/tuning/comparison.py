"""Compare ways of running a model: each is verified against the first and timed. Starts no process itself."""

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Final, Protocol

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.encoder import EncoderReport
from worker.encoder.way import Way
from worker.tuning.trial import TrialFailed

# All ways are measured for so long together, beside the first batch of each length, with which a way may compile.
MEASURED_SECONDS: Final = 60.0
# A pass lasts at least so long, so that the first batches, which nothing is queued behind, count little.
PASS_SECONDS: Final = 0.25
# Each length is timed so many times, and the fastest pass counts: whatever else uses the device makes others slower.
# A model that takes longer is timed less often, and hardly noticed by what else uses the device.
NUM_PASSES: Final = 7
# A way that takes another backend or switches has to gain so much over a simpler one.
LEAST_GAIN: Final = 1.01
# If the first way is now so much faster or slower than in the beginning, the ways were not measured alike.
MOST_CHANGE: Final = 1.1


class RunningModel(Protocol):
    """A model that is loaded in some way and takes batches, as `worker.tuning.trial.Trial` is."""

    report: EncoderReport

    def encode(self, batches: Sequence[Batch]) -> list[Ragged]: ...

    def measure(self, batches: Sequence[Batch]) -> float: ...


@dataclass(frozen=True, slots=True)
class TrialWork:
    """Batches of texts of one length, in tokens. Repeated, they are the work of a pass."""

    length: int
    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class WayResult:
    """What was found about a way: tokens per second for each length, or why it cannot be used.

    A flaw may pass if it is a failure of the process, such as a lack of memory.
    """

    way: Way
    tokens_per_second: tuple[float, ...] = ()
    flaw: str = ""
    may_pass: bool = False

    def compare(self, other: "WayResult") -> float:
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
    workloads: Sequence[TrialWork],
    find_flaw: FindFlaw,
) -> tuple[WayResult, ...]:
    """Try each way and return what was found, in their order.

    Results of the batch `known` are compared with those of the first way that works, which is measured again at the
    end. A way that fails or whose results differ has its reason instead of rates. A way of which a switch cannot be
    used is measured without it, unless it is another way then.

    Raise TrialFailed if no way works, or if the device has become faster or slower meanwhile.
    """
    findings: list[WayResult] = []
    expected: Ragged | None = None
    # The first way is measured twice.
    seconds = MEASURED_SECONDS / (len(ways) + 1) / len(workloads)
    for way in ways:
        try:
            with open_trial(way) as model:
                used = Way(
                    model.report.backend.value,
                    tuple(switch for switch in way.switches if switch in model.report.switches),
                )
                if used != way and (
                    used.backend != way.backend or used in (*ways, *(each.way for each in findings))
                ):
                    findings.append(WayResult(way, flaw=_explain(used, way, model.report)))
                    continue
                results = model.encode([known])[0]
                if expected is None:
                    expected = results
                elif flaw := find_flaw(results, expected, model.report):
                    findings.append(WayResult(used, flaw=f"its results differ: {flaw}"))
                    continue
                findings.append(WayResult(used, _measure(model, workloads, seconds)))
        except TrialFailed as error:
            findings.append(WayResult(way, flaw=str(error), may_pass=True))
    usable = [finding for finding in findings if not finding.flaw]
    if not usable:
        raise TrialFailed("; ".join(f"{finding.way}: {finding.flaw}" for finding in findings))
    if len(usable) > 1:
        with open_trial(usable[0].way) as model:
            change = WayResult(usable[0].way, _measure(model, workloads, seconds)).compare(usable[0])
        if not 1 / MOST_CHANGE < change < MOST_CHANGE:
            raise TrialFailed(
                f"{usable[0].way} was {change:.2f} times as fast in the end as in the beginning, so something else "
                "uses the device"
            )
    return tuple(findings)


def choose_best(findings: Sequence[WayResult]) -> WayResult:
    """Return the fastest way; of ways that hardly differ from it, the first."""
    usable = [finding for finding in findings if not finding.flaw]
    fastest = max(usable, key=lambda finding: finding.compare(usable[0]))
    return next(finding for finding in usable if fastest.compare(finding) < LEAST_GAIN)


def _explain(used: Way, way: Way, report: EncoderReport) -> str:
    """Return why the model does not run in the way that was asked for."""
    if used.backend != way.backend:
        return f"{report.backend.value} runs instead: {report.backend.reason}"
    missing = [switch for switch in way.switches if switch not in used.switches]
    notes = [note for note in report.notes if any(f" {switch} " in note for switch in missing)]
    return " ".join(notes).rstrip(".") or f"{', '.join(missing)} was turned off"


def _measure(model: RunningModel, workloads: Sequence[TrialWork], seconds: float) -> tuple[float, ...]:
    """Return the tokens per second that a model computes of each workload, measured for at most `seconds` each.

    If a single batch takes longer, it is the measurement.
    """
    rates = []
    for workload in workloads:
        first = workload.batches[:1]
        model.measure(first)  # it also compiles, or allocates memory
        alone = model.measure(first)
        left = int((seconds - alone) / max(alone, 1e-6))  # batches
        number = min(left, max(len(workload.batches), math.ceil(PASS_SECONDS / max(alone, 1e-6))))
        batches = tuple(islice(cycle(workload.batches), number)) or first
        num_passes = min(NUM_PASSES, left // number) if number > 0 else 0
        fastest = min((model.measure(batches) for _ in range(num_passes)), default=alone)
        rates.append(sum(batch.num_tokens for batch in batches) / fastest)
    return tuple(rates)
