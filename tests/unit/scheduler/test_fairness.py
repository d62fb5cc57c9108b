"""Whose chunks go next: priorities, ageing, turns, and what an interactive job may take."""

from collections.abc import Mapping
from uuid import UUID

import pytest

from scheduler.dispatcher import MAX_INTERACTIVE_CHUNKS, effective_priority, plan_shares
from vectormill.jobs.dispatch import Demand, WorkerCapacity

AGEING_SECONDS = 600.0


def demand(
    number: int,
    *,
    priority: int = 5,
    waited_seconds: float = 0.0,
    model: str = "m",
    chunk_tokens: int = 1,
    open_chunks: int = 1000,
) -> Demand:
    return Demand(UUID(int=number), number, model, priority, waited_seconds, chunk_tokens, open_chunks)


def room(
    slots: int, *, outstanding: int = 0, interactive: int = 0, model: str = "m", tokens: int = 1 << 30
) -> WorkerCapacity:
    """Of so many slots, and for so many tokens more."""
    return WorkerCapacity(model, slots, outstanding, interactive, 1 << 31, (1 << 31) - tokens)


def share_out(
    demands: list[Demand], *rooms: WorkerCapacity, served: Mapping[UUID, int] | None = None
) -> dict[int, int]:
    """Chunks by the number of the job."""
    shares = plan_shares(demands, rooms, served or {}, AGEING_SECONDS)
    return {share.job_id.int: share.num_chunks for share in shares}


@pytest.mark.parametrize(
    ("priority", "waited_seconds", "effective"),
    [
        (5, 599.0, 5),  # not yet
        (5, 1200.0, 3),
        (9, 1e6, 1),  # never interactive, however long
        (0, 0.0, 0),
        (0, 1e6, 0),
    ],
)
def test_a_job_that_waits_becomes_more_urgent(priority: int, waited_seconds: float, effective: int) -> None:
    aged = demand(1, priority=priority, waited_seconds=waited_seconds)
    assert effective_priority(aged, AGEING_SECONDS) == effective


def test_jobs_of_one_class_take_turns_and_the_one_served_least_is_first() -> None:
    assert share_out([demand(1), demand(2)], room(4)) == {1: 2, 2: 2}
    assert share_out([demand(1), demand(2)], room(3), served={UUID(int=1): 9, UUID(int=2): 8}) == {2: 2, 1: 1}


def test_a_job_of_long_texts_and_one_of_short_ones_get_the_same_number_of_tokens() -> None:
    long, short = demand(1, chunk_tokens=60), demand(2, chunk_tokens=20)
    assert share_out([long, short], room(100, tokens=240)) == {1: 2, 2: 6}


def test_the_tokens_that_workers_ask_for_are_filled_and_the_last_chunk_may_exceed_them() -> None:
    assert share_out([demand(1, chunk_tokens=64)], room(16, tokens=200)) == {1: 4}
    assert share_out([demand(1, chunk_tokens=64)], room(16, tokens=0)) == {}
    assert share_out([demand(1, chunk_tokens=64)], room(3, tokens=1 << 20)) == {1: 3}


def test_a_job_is_given_no_more_turns_than_it_has_chunks() -> None:
    assert share_out([demand(1, open_chunks=1), demand(2, chunk_tokens=50)], room(4)) == {1: 1, 2: 3}


def test_a_less_urgent_class_waits_until_it_has_aged() -> None:
    assert share_out([demand(1, priority=4), demand(2)], room(4)) == {1: 4}
    assert share_out([demand(1, priority=4), demand(2, waited_seconds=600)], room(4)) == {1: 2, 2: 2}


@pytest.mark.parametrize("outstanding", [4, 5])  # full, and more than full after a worker died
def test_without_room_nothing_is_dispatched(outstanding: int) -> None:
    assert share_out([demand(1)], room(4, outstanding=outstanding)) == {}


def test_each_model_has_its_own_room() -> None:
    demands = [demand(1, model="a"), demand(2, model="b"), demand(3, model="nobody serves it")]
    assert share_out(demands, room(2, model="a"), room(3, model="b")) == {1: 2, 2: 3}


def test_an_interactive_job_needs_no_room() -> None:
    shares = share_out([demand(1, priority=0), demand(2)], room(4, outstanding=2))
    assert shares == {1: MAX_INTERACTIVE_CHUNKS, 2: 2}


def test_interactive_jobs_together_never_have_more_than_their_most_at_the_workers() -> None:
    many = [demand(number, priority=0) for number in range(1, 4)]
    assert sum(share_out(many, room(4)).values()) == MAX_INTERACTIVE_CHUNKS
    assert share_out(many, room(4, interactive=MAX_INTERACTIVE_CHUNKS - 1)) == {1: 1}
    assert share_out(many, room(4, interactive=MAX_INTERACTIVE_CHUNKS)) == {}
