"""What a group makes of what its ranks say: real pipes, and ranks that say what a test puts into their mouths."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from vectormill.models.registry import DEFAULT_MODEL, Registry
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.device import CPU, Device
from worker.encoder.encoder import Choice, EncoderOrder, EncoderReport, Loading
from worker.runner import runner_group
from worker.runner.memory import MemoryReport
from worker.runner.messages import Encode, Encoded, EncodeFailed, Load, Loaded, Reading, Started
from worker.runner.runner import RunnerLost
from worker.runner.runner_group import RunnerGroup

DEVICE = Device("cpu:0", CPU, 0, (), 1, 1 << 30)
EXHAUSTED = EncodeFailed(2, "RuntimeError: can't allocate memory", is_out_of_memory=True)
CONSEQUENCE = EncodeFailed(2, "RuntimeError: Connection closed by peer", is_out_of_memory=False)


class ScriptedRunner:
    """Has the methods of a Runner that a group calls; `say` is its process."""

    def __init__(self, load: Load, environment: Mapping[str, str]) -> None:
        self.connection, self._theirs = Pipe(duplex=False)
        self.sent: list[Any] = []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def say(self, *messages: object) -> None:
        for message in messages:
            self._theirs.send(message)

    def die(self) -> None:
        self._theirs.close()

    def receive(self) -> list[Any]:
        try:
            return [self.connection.recv()]
        except EOFError as error:
            raise RunnerLost("the model process was killed by SIGKILL", is_foreign=True) from error

    def kill(self) -> list[Any]:
        self._theirs.close()
        unread: list[Any] = []
        while True:
            try:
                unread.append(self.connection.recv())
            except EOFError:
                return unread


Ranks = tuple[RunnerGroup, list[ScriptedRunner]]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(runner_group, "Runner", ScriptedRunner)
    monkeypatch.setattr(runner_group, "CAUSE_SECONDS", 0.2)
    order = EncoderOrder(Registry({}).card(DEFAULT_MODEL), DEVICE, "torch", "fp32", 1, Path())
    group = RunnerGroup([Load("", order)] * 2, [{}] * 2, TemporaryDirectory())
    yield group, group._runners  # type: ignore[misc]
    group.kill()


def encoded(number: int, used_share: float | None = None) -> Encoded:
    memory = None if used_share is None else MemoryReport(1 << 20, 2 << 20, 3 << 20, used_share)
    return Encoded(number, Ragged.from_matrix(np.zeros((1, 4), np.float32)), 0.1, memory)


def encode(number: int, *, is_urgent: bool = False) -> Encode:
    return Encode(number, Batch.from_ids([np.array([1, number], np.int32)]), is_urgent)


def hear(group: RunnerGroup) -> list[Any]:
    """Everything that the group says to what lies in its pipes now."""
    said: list[Any] = []
    while any(connection.poll() for connection in group.connections):
        said += group.receive()
    return said


def test_a_rank_that_runs_out_of_memory_ends_the_group_with_the_batch_to_be_halved(ranks: Ranks) -> None:
    group, (first, second) = ranks
    first.say(Started(1), encoded(1), Started(2))
    second.say(Started(1), encoded(1), EXHAUSTED)
    with pytest.raises(RunnerLost, match=r"rank 1 failed .*can't allocate memory") as caught:
        hear(group)
    assert caught.value.failed == EXHAUSTED
    assert not caught.value.is_foreign


def test_what_was_said_before_a_failure_is_not_lost_with_it(ranks: Ranks) -> None:
    group, (first, second) = ranks
    first.say(Started(1), EXHAUSTED)
    second.say(encoded(1))
    with pytest.raises(RunnerLost):
        hear(group)
    first.say(encoded(1))  # behind its failure, since outcomes are sent when the next batch has begun
    numbers = [message.number for message in group.kill() if isinstance(message, Encoded)]
    assert numbers == [1]


def test_what_was_said_before_the_end_is_told_once(ranks: Ranks) -> None:
    """An executor kills a group that takes too long, and kills it again when it recovers."""
    group, (first, second) = ranks
    first.say(Started(1), encoded(1))
    second.say(encoded(1))
    assert [type(message) for message in group.kill()] == [Started, Encoded]
    assert group.kill() == []


def test_a_failure_that_all_ranks_share_ends_them_too_since_they_may_have_failed_at_other_places(
    ranks: Ranks,
) -> None:
    group, (first, second) = ranks
    for rank in (first, second):
        rank.say(Started(2), EncodeFailed(2, "ValueError: a bad sequence"))
    with pytest.raises(RunnerLost, match="a bad sequence") as caught:
        hear(group)
    assert caught.value.failed is not None


def test_the_death_of_a_rank_is_told_and_not_the_error_that_it_gave_its_neighbour(ranks: Ranks) -> None:
    group, (first, second) = ranks
    first.say(Started(2), CONSEQUENCE)
    second.die()
    with pytest.raises(RunnerLost, match="SIGKILL") as caught:
        hear(group)
    assert caught.value.is_foreign
    assert caught.value.failed is None


def test_an_error_without_a_death_is_told_when_none_has_come(ranks: Ranks) -> None:
    group, (first, _) = ranks
    first.say(Started(2), CONSEQUENCE)
    with pytest.raises(RunnerLost, match="closed by peer"):
        hear(group)


def test_the_memory_of_the_group_is_reported_when_every_rank_has_told_its_own(ranks: Ranks) -> None:
    group, (first, second) = ranks
    choice = Choice("cpu:0", "requested")
    report = EncoderReport(choice, choice, choice, "padded", 1, 0.0)
    for rank, used_share in ((first, 0.2), (second, 0.7)):
        rank.say(Loaded(report, MemoryReport(1 << 20, 2 << 20, 3 << 20, used_share)), Started(1))
    (loaded, _) = hear(group)
    assert loaded.memory.used_share == 0.7, "the fullest device bounds them all"
    assert loaded.memory.process_bytes == 2 << 20
    assert [rank.used_share for rank in loaded.memory.ranks] == [0.2, 0.7]

    first.say(encoded(1, 0.3), Started(2))
    second.say(encoded(1))
    assert [message.memory for message in hear(group) if isinstance(message, Encoded)] == [None]
    first.say(encoded(2))
    second.say(encoded(2, 0.6))
    (second_batch,) = (message for message in hear(group) if isinstance(message, Encoded))
    assert second_batch.memory is not None
    assert [rank.used_share for rank in second_batch.memory.ranks] == [0.3, 0.6]


def test_what_ranks_read_is_told_as_one_sum_and_kept_by_rank(ranks: Ranks) -> None:
    group, (first, second) = ranks
    first.say(Reading(10, 100))
    assert hear(group) == []  # the other one has yet to say how much it will read
    second.say(Reading(5, 50), Reading(50, 50))
    assert hear(group) == [Reading(15, 150), Reading(60, 150)]
    for number, rank in enumerate((first, second)):
        choice, precision = Choice(f"cpu:{number}", ""), Choice("fp32", "")
        loading = Loading(choice.value, 100 // (number + 1), 1.5)
        rank.say(Loaded(EncoderReport(choice, choice, precision, "", 1, 1.5, loadings=(loading,))))
    (loaded,) = hear(group)
    assert loaded.report.loadings == (Loading("cpu:0", 100, 1.5), Loading("cpu:1", 50, 1.5))


def test_every_rank_gets_the_batches_in_one_order_which_none_changes(ranks: Ranks) -> None:
    group, runners = ranks
    for number in (1, 2, 3):
        group.send(encode(number, is_urgent=number == 3))
    assert [[each.number for each in rank.sent] for rank in runners] == [[1, 2, 3]] * 2
    assert not any(each.is_urgent for rank in runners for each in rank.sent), "none overtakes on a rank"


def test_two_batches_that_ranks_have_begun_are_both_said_and_the_second_again_when_its_turn_comes(
    ranks: Ranks,
) -> None:
    group, (first, second) = ranks
    second.say(Started(1), Started(2))
    first.say(Started(1), encoded(1))
    assert hear(group) == [Started(1), Started(2)]
    second.say(encoded(1))
    ended, again = hear(group)
    assert (ended.number, again) == (1, Started(2))


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_ranks_end_at_once_and_none_waits_for_another(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    group, runners = ranks
    all_are_ending = Barrier(len(runners))

    def wait_for_the_others(runner: ScriptedRunner) -> list[Any]:
        all_are_ending.wait(10)
        return []

    with monkeypatch.context() as patched:
        patched.setattr(ScriptedRunner, end, wait_for_the_others, raising=False)
        getattr(group, end)()
    assert not all_are_ending.broken


@pytest.mark.parametrize(
    ("other", "flaw"),
    [
        ({"attention": "packed", "is_packed": True}, "a different attention"),
        ({"is_queued": True}, "a different queue"),
        ({"precision": Choice("fp16", "no bf16")}, "a different precision"),
        ({"load_seconds": 9.0, "notes": ("slow",), "device": Choice("cpu:1", "")}, ""),
    ],
)
def test_ranks_that_were_loaded_differently_get_no_batch(
    ranks: Ranks, other: dict[str, Any], flaw: str
) -> None:
    group, (first, second) = ranks
    choice = Choice("cpu:0", "requested")
    report = EncoderReport(choice, choice, choice, "padded", 1, 0.0)
    first.say(Loaded(report))
    second.say(Loaded(replace(report, **other)))
    (said,) = hear(group)
    if flaw:
        assert f"Rank 1 was loaded with {flaw} than rank 0" in said.reason
    else:
        assert isinstance(said, Loaded)
