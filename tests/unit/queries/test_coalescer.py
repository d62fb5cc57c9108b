"""Questions that come together are carried out together; each caller gets its own answer, or its own error."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from vectormill.coalescer import CallNotStarted, Coalescer
from vectormill.domain.errors import LimitReached


class Kitchen:
    """Doubles numbers. Notes what was carried out together, and waits at the gate while that is closed."""

    def __init__(self, **options: Any) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.at_once = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.coalescer: Coalescer[str, int, int] = Coalescer(self.cook, **{"max_waiting": 100, **options})

    async def cook(self, key: str, numbers: Sequence[int]) -> list[int]:
        self.calls.append((key, list(numbers)))
        self.at_once += 1
        try:
            await self.gate.wait()
            if 13 in numbers:
                raise ValueError("13 is among them")
        finally:
            self.at_once -= 1
        return [2 * number for number in numbers]

    def ask(self, *numbers: int, key: str = "a") -> "list[asyncio.Task[int]]":
        return [asyncio.create_task(self.coalescer.ask(key, number)) for number in numbers]


def run(story: Callable[[], Any]) -> None:
    async def told() -> None:
        async with asyncio.timeout(30):
            await story()

    asyncio.run(told())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_what_comes_in_one_turn_of_the_loop_goes_together_and_each_hears_its_own() -> None:
    async def story() -> None:
        kitchen = Kitchen()
        first, other = kitchen.ask(1, 2, 3), kitchen.ask(4, key="b")
        assert await asyncio.gather(*first, *other) == [2, 4, 6, 8]
        assert kitchen.calls == [("a", [1, 2, 3]), ("b", [4])]
        await settle()
        assert (kitchen.coalescer.num_waiting, kitchen.coalescer.num_running) == (0, 0)
        assert (kitchen.coalescer._queues, kitchen.coalescer._running) == ({}, {})

    run(story)


def test_what_comes_while_its_key_is_at_work_waits_for_the_next_call() -> None:
    async def story() -> None:
        kitchen = Kitchen(max_running_of=lambda _: 1)
        kitchen.gate.clear()
        asked = kitchen.ask(1)
        await settle()
        asked += kitchen.ask(2, 3)
        other = kitchen.ask(9, key="b")
        await settle()
        assert kitchen.calls == [("a", [1]), ("b", [9])]
        kitchen.gate.set()
        assert await asyncio.gather(*asked, *other) == [2, 4, 6, 18]
        assert kitchen.calls[2:] == [("a", [2, 3])]

    run(story)


def test_the_oldest_question_of_all_keys_comes_first_and_no_more_run_than_may() -> None:
    async def story() -> None:
        kitchen = Kitchen(max_running=2, count=lambda key, waiting: 1)
        asked = kitchen.ask(1, key="b") + kitchen.ask(2, key="a") + kitchen.ask(3, key="b")
        kitchen.gate.clear()
        await settle()
        assert kitchen.at_once == 2
        kitchen.gate.set()
        assert await asyncio.gather(*asked) == [2, 4, 6]
        assert [numbers for _, numbers in kitchen.calls] == [[1], [2], [3]]

    run(story)


def test_only_so_many_go_together_as_are_counted_from_the_oldest() -> None:
    async def story() -> None:
        kitchen = Kitchen(count=lambda key, waiting: 2)
        await asyncio.gather(*kitchen.ask(1, 2, 3, 4, 5))
        assert [numbers for _, numbers in kitchen.calls] == [[1, 2], [3, 4], [5]]

    run(story)


def test_in_a_pause_more_may_come() -> None:
    async def story() -> None:
        kitchen = Kitchen(choose_pause=lambda: 0.05)
        asked = kitchen.ask(1)
        await settle()
        asked += kitchen.ask(2)
        assert await asyncio.gather(*asked) == [2, 4]
        assert kitchen.calls == [("a", [1, 2])]

    run(story)


def test_a_caller_that_goes_while_it_waits_is_not_carried_out_and_leaves_its_place() -> None:
    async def story() -> None:
        kitchen = Kitchen(max_running=1, max_waiting=2)
        kitchen.gate.clear()
        first = kitchen.ask(1)
        await settle()
        gone, stays = kitchen.ask(2, 3)
        await settle()
        gone.cancel()
        await settle()
        assert kitchen.coalescer.num_waiting == 1
        more = kitchen.ask(4)
        kitchen.gate.set()
        assert await asyncio.gather(*first, stays, *more) == [2, 6, 8]
        assert [numbers for _, numbers in kitchen.calls] == [[1], [3, 4]]

    run(story)


def test_a_caller_that_goes_after_it_was_begun_takes_nothing_from_the_others() -> None:
    async def story() -> None:
        kitchen = Kitchen()
        kitchen.gate.clear()
        gone, stays = kitchen.ask(1, 2)
        await settle()
        gone.cancel()
        await settle()
        kitchen.gate.set()
        assert await stays == 4
        assert gone.cancelled()

    run(story)


def test_a_call_whose_callers_have_all_gone_is_abandoned_where_nobody_else_needs_it() -> None:
    async def story() -> None:
        for abandons, at_once in ((True, 0), (False, 1)):
            kitchen = Kitchen(abandons=abandons)
            kitchen.gate.clear()
            first, second = kitchen.ask(1, 2)
            await settle()
            first.cancel()
            await settle()
            assert (kitchen.at_once, kitchen.coalescer.num_running) == (1, 1)
            second.cancel()
            await settle()
            assert (kitchen.at_once, kitchen.coalescer.num_running) == (at_once, at_once)
            kitchen.gate.set()
            await kitchen.coalescer.close()
            assert await asyncio.gather(*kitchen.ask(3)) == [6]

    run(story)


def test_an_error_is_everybodys_who_was_carried_out_with_it_and_nobody_elses() -> None:
    async def story() -> None:
        kitchen = Kitchen()
        others = kitchen.ask(1, key="b")
        found = await asyncio.gather(*kitchen.ask(2, 13), *others, return_exceptions=True)
        assert [type(each) for each in found] == [ValueError, ValueError, int]
        assert await asyncio.gather(*kitchen.ask(2)) == [4]

    run(story)


def test_an_error_that_may_be_of_one_is_told_to_that_one_alone() -> None:
    async def story() -> None:
        kitchen = Kitchen(is_of_one=lambda error: isinstance(error, ValueError))
        found = await asyncio.gather(*kitchen.ask(1, 13, 3), return_exceptions=True)
        assert [found[0], str(found[1]), found[2]] == [2, "13 is among them", 6]
        assert [numbers for _, numbers in kitchen.calls] == [[1, 13, 3], [1], [13], [3]]

    run(story)


def test_no_more_wait_than_there_is_room_for() -> None:
    async def story() -> None:
        kitchen = Kitchen(max_running=1, max_waiting=2)
        kitchen.gate.clear()
        asked = kitchen.ask(1)
        await settle()
        asked += kitchen.ask(2, 3)
        await settle()
        with pytest.raises(LimitReached, match="2 requests of this kind"):
            await kitchen.coalescer.ask("b", 4)
        kitchen.gate.set()
        assert await asyncio.gather(*asked) == [2, 4, 6]
        assert await kitchen.coalescer.ask("b", 4) == 8

    run(story)


def test_what_waits_too_long_is_not_begun_and_what_was_begun_is_waited_for() -> None:
    async def story() -> None:
        kitchen = Kitchen(max_running=1)
        kitchen.gate.clear()
        (begun,) = kitchen.ask(1)
        await settle()
        with pytest.raises(CallNotStarted):
            await kitchen.coalescer.ask("a", 2, max_wait_seconds=0.02)
        kitchen.gate.set()
        assert await begun == 2
        assert kitchen.calls == [("a", [1])]

    run(story)


def test_an_answer_too_few_is_an_error_and_nobody_waits_for_ever() -> None:
    async def story() -> None:
        async def forget(_: str, numbers: Sequence[int]) -> list[int]:
            return list(numbers)[1:]

        coalescer: Coalescer[str, int, int] = Coalescer(forget, max_waiting=10)
        found = await asyncio.gather(*(coalescer.ask("a", n) for n in (1, 2)), return_exceptions=True)
        assert isinstance(found[1], ValueError)

    run(story)


def test_closing_waits_for_what_was_begun() -> None:
    async def story() -> None:
        kitchen = Kitchen()
        asked = kitchen.ask(1)
        await settle()
        await kitchen.coalescer.close()
        assert kitchen.coalescer.num_running == 0
        assert await asyncio.gather(*asked) == [2]

    run(story)
