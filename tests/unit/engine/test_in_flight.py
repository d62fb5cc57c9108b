"""What becomes of batches when one fails or their process is lost: who is to blame, and what is tried again."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from vectormill.ragged import Ragged
from worker.batching.batch import Batch, OwnedBatch, Sequences
from worker.encoder.encoder import Choice, EncoderReport
from worker.engine.in_flight import FAILURES_OF_ONE, InFlight, KnownTexts
from worker.runner.memory import MemoryReport
from worker.runner.messages import Encode, Encoded, EncodeFailed, Started
from worker.runner.runner import RunnerLost
from worker.tasks.finishing import find_turned

VECTOR = np.arange(1, 5, dtype=np.float32)
CHOICE = Choice("fake", "for tests")
KNOWN_TEXTS = KnownTexts(Batch.from_ids([np.arange(5, dtype=np.int32)]), find_turned)
REPORT = EncoderReport(CHOICE, CHOICE, CHOICE, "none", 1, 0.0)


class ClusterState:
    """Both neighbours of the batches in flight; keeps what it is told."""

    def __init__(self) -> None:
        self.works: list[OwnedBatch] = []
        self.delivered: list[OwnedBatch] = []
        self.failed: list[OwnedBatch] = []
        self.lost: list[OwnedBatch] = []
        self.taken_back: list[OwnedBatch] = []
        self.taught: list[float] = []
        self.exhausted: list[OwnedBatch] = []
        self.refused: list[OwnedBatch] = []

    def next_work(self, *, is_runner_idle: bool, only_urgent: bool) -> OwnedBatch | None:
        """Return the first work, or the first urgent one."""
        places = (place for place, work in enumerate(self.works) if work.is_urgent or not only_urgent)
        place = next(places, None)
        return None if place is None else self.works.pop(place)

    def ask_again_at(self) -> float | None:
        return None

    def deliver(
        self, work: OwnedBatch, results: Ragged, seconds: float, collate_seconds: float, share: float
    ) -> None:
        self.delivered.append(work)

    def fail_work(self, work: OwnedBatch, code: str, reason: str) -> None:
        self.failed.append(work)

    def lose_work(self, work: OwnedBatch, reason: str) -> None:
        self.lost.append(work)

    def refuse_longer(self, work: OwnedBatch) -> None:
        self.refused.append(work)

    def take_back(self, works: Iterable[OwnedBatch]) -> list[OwnedBatch]:
        works = list(works)
        self.taken_back = [work for work in works if not work.is_doubtful]
        self.works = [*self.taken_back, *self.works]
        return [work for work in works if work.is_doubtful]

    def close(self, reason: str) -> None: ...
    def observe_encoded(self, work: OwnedBatch, seconds: float, memory: MemoryReport | None) -> None:
        self.taught.append(seconds)

    def note(self, batch: Batch) -> None: ...
    def observe_out_of_memory(self, work: OwnedBatch, reason: str) -> None:
        self.exhausted.append(work)


class Desk:
    """Batches in flight whose runner is the test."""

    def __init__(self, *sizes: int) -> None:
        self.around = ClusterState()
        self.around.works = [make_work(request, size) for request, size in enumerate(sizes)]
        self.in_flight = InFlight(cast(Any, self.around), cast(Any, self.around), KNOWN_TEXTS, 4)
        self.load()

    def load(self, memory: MemoryReport | None = None) -> None:
        self.in_flight.begin(REPORT, memory)
        self.sing()

    def sing(self, vector: NDArray[np.float32] = VECTOR) -> None:
        """The runner answers the known texts that it is sent."""
        while self.in_flight.check.num_due:
            known = self.in_flight.next_message()
            assert known is not None
            rows = Ragged.from_matrix(np.tile(vector, (len(known.batch), 1)))
            self.in_flight.receive(Encoded(known.number, rows, 0.1))

    def start(self) -> int:
        message = self.in_flight.next_message()
        assert message is not None
        self.in_flight.receive(Started(message.number))
        return message.number

    def end(self, number: int, seconds: float = 0.1) -> None:
        size = len(self.in_flight.outstanding[number].sequences)
        self.in_flight.receive(Encoded(number, Ragged.from_matrix(np.zeros((size, 4), np.float32)), seconds))

    def fail(self, number: int) -> None:
        self.in_flight.receive(EncodeFailed(number, "an error"))

    def waiting(self) -> list[int]:
        """The sizes of what is to be sent again, in order."""
        sizes = []
        while (work := self.in_flight.next_work()) is not None:
            sizes.append(len(work.sequences))
        return sizes


def make_work(request: int, size: int) -> OwnedBatch:
    batch = Batch.from_ids([np.arange(3, dtype=np.int32)] * size)
    sequences = Sequences(
        np.full(size, request),
        np.arange(size, dtype=np.int32),
        np.full(size, 3, np.int32),
        np.full(size, 3.0),
    )
    return OwnedBatch(sequences, batch)


def test_the_size_of_a_batch_follows_from_the_seconds_that_a_shared_gpu_computed_it() -> None:
    desk = Desk(4)
    rows = Ragged.from_matrix(np.zeros((4, 4), np.float32))
    desk.in_flight.receive(Encoded(desk.start(), rows, 0.4, share=0.25))
    assert desk.around.taught == [0.1]


def test_nothing_is_sent_behind_a_failure_before_known_texts_were_encoded() -> None:
    desk = Desk(4, 4)
    desk.fail(desk.start())
    assert desk.in_flight.next_work() is None
    desk.sing()
    assert desk.waiting() == [1, 1, 1, 1, 4]


def test_what_comes_behind_a_wrong_answer_to_the_known_text_is_not_delivered() -> None:
    """The runner had the batch already, and both answers can be read at once."""
    desk = Desk(4, 3)
    failing, other = desk.start(), desk.start()
    desk.fail(failing)
    desk.sing(-VECTOR)
    desk.in_flight.receive(Encoded(other, Ragged.from_matrix(np.zeros((3, 4), np.float32)), 0.1))
    assert not desk.around.delivered
    desk.in_flight.lose(RunnerLost("it is sick", is_sick=True))
    desk.load()
    assert sorted(desk.waiting()) == [1, 1, 1, 1, 3]


def test_what_a_process_in_doubt_answers_is_delivered_when_it_turns_out_sound_and_else_encoded_again() -> (
    None
):
    for vector, num_delivered in ((VECTOR, 1), (-VECTOR, 0)):
        desk = Desk(4, 3)
        failing, other = desk.start(), desk.start()
        desk.fail(failing)
        desk.in_flight.receive(Encoded(other, Ragged.from_matrix(np.zeros((3, 4), np.float32)), 0.1))
        assert not desk.around.delivered
        desk.sing(vector)
        assert len(desk.around.delivered) == num_delivered
        if not num_delivered:
            assert "a cosine of -1.000" in desk.in_flight.check.flaw
            desk.in_flight.lose(RunnerLost("it is sick", is_sick=True))
            desk.load()
            assert sorted(desk.waiting()) == [1, 1, 1, 1, 3]


def test_a_text_fails_when_it_has_failed_alone_often_enough_in_a_sound_process() -> None:
    desk = Desk(1)
    for _ in range(FAILURES_OF_ONE):
        assert not desk.around.failed
        desk.fail(desk.start())
        desk.sing()
    assert [work.sequences.requests.tolist() for work in desk.around.failed] == [[0]]


def test_a_process_that_somebody_killed_is_nobodys_fault_and_teaches_nothing() -> None:
    desk = Desk(4)
    desk.start()
    desk.in_flight.lose(RunnerLost("it was killed", is_foreign=True))
    desk.load()
    assert desk.waiting() == [4]
    assert not desk.around.lost
    assert not desk.around.exhausted


def test_a_process_that_the_kernel_killed_for_want_of_memory_has_its_batch_tried_in_parts() -> None:
    desk = Desk(4)
    desk.start()
    desk.in_flight.lose(RunnerLost("the kernel killed it", is_exhausted=True))
    desk.load()
    assert desk.waiting() == [1, 1, 1, 1]
    assert [len(work.sequences) for work in desk.around.exhausted] == [4]


def test_a_process_that_was_killed_when_memory_was_full_was_killed_for_want_of_it() -> None:
    desk = Desk(4)
    desk.load(MemoryReport(1, 1, 0, 0.97))
    desk.start()
    desk.in_flight.lose(RunnerLost("it was killed", is_foreign=True))
    assert len(desk.around.exhausted) == 1


def test_one_text_with_which_two_processes_died_for_want_of_memory_is_given_up_and_no_longer_one_is_tried() -> (
    None
):
    desk = Desk(1)
    for _ in range(2):
        desk.load()
        assert not desk.around.failed
        desk.start()
        desk.in_flight.lose(RunnerLost("the kernel killed it", is_exhausted=True))
    assert (len(desk.around.failed), len(desk.around.refused), len(desk.around.lost)) == (1, 1, 0)


def test_batches_of_a_lost_process_are_made_anew_for_the_next_and_suspects_stay() -> None:
    desk = Desk(4, 1)
    desk.start()
    failed = desk.start()
    desk.fail(failed)
    desk.sing()  # it is tried again, alone
    desk.in_flight.lose(RunnerLost("it was killed", is_foreign=True))
    desk.load()
    assert [len(work.sequences) for work in desk.around.taken_back] == [4]
    assert desk.waiting() == [1, 4]


def test_rows_that_are_no_vectors_fail_like_a_batch_that_raised() -> None:
    desk = Desk(2)
    misfit = Ragged.from_rows([VECTOR, VECTOR[:3]], np.float32)
    desk.in_flight.receive(Encoded(desk.start(), misfit, 0.1))
    assert not desk.around.delivered
    desk.sing()
    assert desk.waiting() == [1, 1]


def test_a_process_whose_known_text_gets_no_vector_is_not_believed() -> None:
    desk = Desk(1)
    desk.in_flight.begin(REPORT, None)
    desk.sing(VECTOR[:3])
    assert "have 3 values, and vectors of this model have 4" in desk.in_flight.check.flaw


@pytest.mark.parametrize(("seconds", "num_sent"), [(0.1, 3), (0.5, 2)])
def test_a_device_that_queues_has_one_batch_more_where_batches_are_short(
    seconds: float, num_sent: int
) -> None:
    desk = Desk(*[1] * 9)
    desk.in_flight.begin(replace(REPORT, is_queued=True), None)
    desk.sing()
    desk.end(desk.start(), seconds)
    while desk.in_flight.next_message():
        pass
    assert len(desk.in_flight.outstanding) == num_sent


def test_urgent_batches_come_on_top_of_a_full_house_of_bulk_but_not_without_end() -> None:
    desk = Desk(*[1] * 8)
    desk.around.works[3:] = [replace(work, is_urgent=True) for work in desk.around.works[3:]]
    sent: list[Encode] = []
    while message := desk.in_flight.next_message():
        sent.append(message)
    assert [each.is_urgent for each in sent] == [False, False, True, True]
    desk.end(sent[2].number)
    another = desk.in_flight.next_message()
    assert another is not None
    assert another.is_urgent
    assert desk.in_flight.next_message() is None
