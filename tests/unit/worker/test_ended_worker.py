"""What a worker's next process is told of the ones before it."""

import signal
from collections.abc import Iterator

import pytest

from vectormill.processes.supervisor import ChildSpec
from worker import launcher
from worker.identity import EndedWorker
from worker.launcher import MAX_ENDED, make_process_spec

REPLICA = ChildSpec("m on cpu:0", ("worker",), {})


def read_ended(spec: ChildSpec) -> list[EndedWorker]:
    return [
        EndedWorker.parse(each.removeprefix("--ended=")) for each in spec.argv if each.startswith("--ended=")
    ]


def next_of(spec: ChildSpec, status: int) -> ChildSpec:
    assert spec.succeed is not None
    return spec.succeed(status)


def test_every_process_has_an_incarnation_of_its_own_and_knows_how_the_former_ended() -> None:
    first = make_process_spec(REPLICA)
    second = next_of(first, -signal.SIGSEGV)
    (former,) = read_ended(second)
    assert f"--incarnation={former.incarnation}" in first.argv
    assert f"--incarnation={former.incarnation}" not in second.argv
    assert (former.is_evidence, former.end) == (True, "SIGSEGV")


def test_ends_that_others_caused_are_no_evidence() -> None:
    for status in (-signal.SIGKILL, -signal.SIGTERM, 0, 1):
        assert not EndedWorker(
            read_ended(next_of(make_process_spec(REPLICA), status))[0].incarnation, status
        ).is_evidence


def test_a_process_that_the_kernel_killed_for_want_of_memory_is_evidence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or a text that takes all memory outside of the model's process would be tried for ever."""
    kills = iter([4, 5, 5, 5, 5])
    monkeypatch.setattr(launcher, "count_kernel_kills", lambda: next(kills))
    second = next_of(make_process_spec(REPLICA), -signal.SIGKILL)
    third = next_of(second, -signal.SIGKILL)
    by_kernel, by_somebody = read_ended(third)
    assert (by_kernel.is_evidence, by_somebody.is_evidence) == (True, False)
    assert by_kernel.end == "SIGKILL, by the kernel for want of memory"


def test_what_could_not_be_told_is_told_later_and_grows_no_command_line_without_end() -> None:
    def ends(spec: ChildSpec) -> Iterator[int]:
        for former in read_ended(spec):
            yield former.status

    spec = make_process_spec(REPLICA)
    for status in range(20):
        spec = next_of(spec, status)
    assert list(ends(spec)) == list(range(20 - MAX_ENDED, 20))
