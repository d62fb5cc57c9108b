"""A job that many follow is read once a poll for all of them."""

import asyncio
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import create_engine

from api.watch import POLL_SECONDS, Watch
from vectormill.domain.errors import JobNotFound

JOB_ID = uuid4()


class Reader:
    """In the place of the database: counts reads, and answers how many there were."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.num_reads = 0
        self.watch = Watch(create_engine("postgresql+psycopg://"), clock=lambda: self.now)
        self.watch.load = self.read  # type: ignore[method-assign]

    def read(self, job_id: object) -> Any:
        self.num_reads += 1
        return self.num_reads

    async def look(self, num_watchers: int) -> list[Any]:
        with self.watch.join(JOB_ID) as glance:
            looks: list[Any] = [self.watch.look(JOB_ID, glance) for _ in range(num_watchers)]
            return list(await asyncio.gather(*looks))


def test_watchers_of_a_job_share_a_read_until_the_next_poll() -> None:
    reader = Reader()

    async def follow() -> None:
        with reader.watch.join(JOB_ID):  # somebody follows it all the time
            assert await reader.look(8) == [1] * 8
            reader.now += POLL_SECONDS * 0.9
            assert await reader.look(8) == [1] * 8
            reader.now += POLL_SECONDS * 0.1
            assert await reader.look(8) == [2] * 8

    asyncio.run(follow())


def test_who_comes_when_nobody_follows_any_more_gets_no_old_read() -> None:
    reader = Reader()

    async def follow() -> None:
        assert await reader.look(2) == [1] * 2
        assert await reader.look(2) == [2] * 2

    asyncio.run(follow())


def test_a_job_that_is_gone_is_gone_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader()

    def find_none(job_id: object) -> Any:
        raise JobNotFound

    monkeypatch.setattr(reader.watch, "load", find_none)

    async def follow() -> None:
        with reader.watch.join(JOB_ID) as glance:
            looks = [reader.watch.look(JOB_ID, glance) for _ in range(3)]
            answers = await asyncio.gather(*looks, return_exceptions=True)
        assert [type(answer) for answer in answers] == [JobNotFound] * 3

    asyncio.run(follow())
