"""A job that many follow is read once a poll for all of them."""

import asyncio
from typing import Any
from uuid import UUID, uuid4

from api.watch import Watch
from vectormill.domain.errors import JobNotFound

JOB_ID = uuid4()


def test_watchers_of_a_job_share_a_read_until_the_next_poll() -> None:
    now, num_reads = 1000.0, 0
    watch = Watch[UUID, int](0.5, clock=lambda: now)

    def read() -> int:
        nonlocal num_reads
        num_reads += 1
        if num_reads > 4:
            raise JobNotFound
        return num_reads

    async def look(num_watchers: int = 8) -> Any:
        with watch.join(JOB_ID) as followed:
            looks = (watch.look(followed, read) for _ in range(num_watchers))
            return await asyncio.gather(*looks, return_exceptions=True)

    async def follow() -> None:
        nonlocal now
        with watch.join(JOB_ID):  # somebody follows it all the time
            assert await look() == [1] * 8
            now += 0.45
            assert await look() == [1] * 8
            now += 0.05
            assert await look() == [2] * 8
        # Who comes when nobody follows any more gets no old read.
        assert await look() == [3] * 8
        assert await look() == [4] * 8
        # A job that is gone is gone for all.
        assert [type(answer) for answer in await look()] == [JobNotFound] * 8

    asyncio.run(follow())
