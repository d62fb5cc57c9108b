"""Live views are read once for all who look at them."""

import asyncio

from api.console.live import LOOK_SECONDS, LiveViews, Rendered, write_message


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_fifty_who_look_at_one_view_cost_one_reading_a_second() -> None:
    clock, num_readings = Clock(), 0
    views = LiveViews(clock)

    def read() -> Rendered:
        nonlocal num_readings
        num_readings += 1
        return Rendered(f"<p>{num_readings}</p>")

    async def look_all() -> list[str]:
        with views.join("jobs") as view:
            seen = await asyncio.gather(*(views.look(view, read) for _ in range(50)))
        return [rendered.html for rendered in seen]

    async def look_twice() -> None:
        with views.join("jobs") as first:
            assert set(await look_all()) == {"<p>1</p>"}
            clock.now += LOOK_SECONDS
            assert set(await look_all()) == {"<p>2</p>"}
            with views.join("queue") as other:
                assert other is not first
        with views.join("jobs") as later:  # nobody was left, so nothing was kept
            assert later is not first

    asyncio.run(look_twice())
    assert num_readings == 2


def test_a_message_keeps_its_lines_and_ends_with_an_empty_one() -> None:
    assert write_message("<p>a\n  b</p>") == "data: <p>a\ndata:   b</p>\n\n"
