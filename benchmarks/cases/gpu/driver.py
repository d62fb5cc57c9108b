"""Driver: goes through the plan, one step after the other, and records how each ended. Knows no device.

Runs steps through a seam of one function, so that all of it is tested without a process.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from benchmarks.cases.gpu.plan import Step, count_seconds
from benchmarks.cases.gpu.state import DONE, Record, State
from benchmarks.order import BenchmarkFailed
from benchmarks.results.writing import write_seconds

SHOWN_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class Ending:
    """How a step's process ended: one of the outcomes of a Record, and what it had found by then."""

    outcome: str
    result: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


class RunStep(Protocol):
    """Runs one step to its end, and ends it at its limit. Raises nothing for what goes wrong in the step."""

    def __call__(self, step: Step, given: Mapping[str, Any]) -> Ending:
        """`given` is what earlier steps found that this one goes by."""
        ...


def drive(
    plan: Sequence[Step],
    state: State,
    run: RunStep,
    give: Callable[[Step, State], Mapping[str, Any]],
    *,
    say: Callable[[str], None],
    clock: Callable[[], float],
    total_seconds: float,
    again: Sequence[str] = (),
) -> tuple[Step, ...]:
    """Runs what has no record, and the steps of `again`; says of each what became of it. Returns those that are left
    because their limit, and so perhaps they, would have ended after `total_seconds`.

    Raises BenchmarkFailed for a name in `again` that no step has, with the nearest that there is.
    """
    refuse_unknown_steps(plan, again)
    deadline = clock() + total_seconds
    waiting: list[Step] = []
    for step in plan:
        before = None if step.name in again else state.find(step.name)
        if step.obstacle:
            say(f"{step.name}: left out, {step.obstacle}")
        elif before is not None:
            say(f"{step.name}: {describe_before(before)}")
        elif waiting or clock() + step.limit_seconds > deadline:
            # None of those behind it either: a later step goes by what an earlier one found.
            waiting.append(step)
            say(f"{step.name}: left for the next start")
        else:
            say(f"{step.name}, at most {write_seconds(step.limit_seconds)}")
            began = clock()
            ending = run(step, give(step, state))
            at = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
            seconds = round(clock() - began, 1)
            state.add(Record(step.name, ending.outcome, seconds, at, ending.result, ending.reason))
    return tuple(waiting)


def refuse_unknown_steps(plan: Sequence[Step], names: Sequence[str]) -> None:
    known = [step.name for step in plan]
    for name in names:
        if name not in known:
            (nearest,) = difflib.get_close_matches(name, known, n=1, cutoff=0)
            raise BenchmarkFailed(
                f"There is no step {name!r}; did you mean {nearest!r}? There are: {', '.join(known)}."
            )


def describe_plan(plan: Sequence[Step], state: State) -> str:
    """How many steps there are, what they may take, and how much of that is left."""
    taken = [step for step in plan if not step.obstacle]
    left = [step for step in taken if state.find(step.name) is None]
    return (
        f"{len(taken)} steps, {count_seconds(taken) / 60:.1f} min if each takes its limit; "
        f"{len(left)} of them to do, {count_seconds(left) / 60:.1f} min"
    )


def describe_before(record: Record) -> str:
    if record.outcome == DONE:
        return f"done before, in {write_seconds(record.seconds)}"
    reason = shorten(record.reason)
    return f"{record.outcome} before: {reason} (--again {record.step!r} repeats it)"


def shorten(text: str) -> str:
    """The last line of a reason, which is the error's own, and no more than fits."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return lines[-1][:SHOWN_CHARS]
