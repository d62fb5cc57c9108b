"""Scores and extractions while everything is killed: each key has one result, which is its own, and no text is blamed.

The small one is of the size that every test run affords. The large one is 100,000 pairs and 20,000 texts, and all is
killed at once in it (`-m slow`).
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import psycopg
import pytest

from tests.acceptance import tiny_tasks
from tests.acceptance.chaos import find_role
from tests.acceptance.stack import Stack, running_stack
from tests.clusters import new_directory
from tests.waiting import wait_for
from vectormill.files.ndjson import ItemJson
from vectormill.problems import ApiError, ApiUnreachable

# The slowest to come back is killed last.
ROLES = ("postgres", "valkey", "scheduler", "api", "worker")
# An API that is away, or whose database is; and a request whose predecessor under the same key is still being read.
PASSING = (409, 502, 503, 504)
STATE = """
    SELECT count(*) FILTER (WHERE finished_at IS NULL), coalesce(sum(num_done), 0) FROM vectormill.jobs
"""
CLAIMS = """
    SELECT count(*), count(*) FILTER (WHERE fence > 1), sum(fence) - count(*)
      FROM vectormill.chunks WHERE state = 'done'
"""


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with new_directory() as directory:
        yield directory


@pytest.fixture
def stack(directory: Path) -> Iterator[Stack]:
    """With a worker for each of two models."""
    # Several chunks in each job of the small one.
    environment = tiny_tasks.write_models(directory) | {"VECTORMILL_CHUNK_MAX_ITEMS": "32"}
    models = (tiny_tasks.JUDGE_MODEL, tiny_tasks.EXTRACT_MODEL)
    with running_stack(directory, environment, *models) as stack:
        yield stack


@pytest.mark.timeout(600)
def test_each_key_has_one_result_whatever_is_killed(stack: Stack, directory: Path) -> None:
    survive(stack, directory, num_pairs=400, num_texts=60)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_each_of_100000_pairs_and_20000_texts_has_one_result_whatever_is_killed(
    stack: Stack, directory: Path
) -> None:
    survive(stack, directory, num_pairs=20_000, num_texts=4_000, num_rounds=4, has_power_cut=True)


def survive(
    stack: Stack,
    directory: Path,
    num_pairs: int,
    num_texts: int,
    *,
    num_rounds: int = 1,
    has_power_cut: bool = False,
) -> None:
    """A job of so many pairs and one of so many texts before each role's processes are killed, as often as that."""
    schema, _, _ = tiny_tasks.read_extractor()
    jobs: list[str] = []
    try:
        for role in ROLES:
            jobs += submit_both(stack, schema, num_pairs, num_texts)
            for _ in range(num_rounds):
                wait_for_progress(stack)
                kill(stack, role)
        if has_power_cut:
            wait_for_progress(stack)
            stack.kill()
            stack.start()
        wait_for(stack.is_ready, 300, "the stack is whole again")
        wait_for(lambda: read_state(stack)[:1] == (0,), 1500, "every job has ended")
        print("chunks, claimed again, claims beyond the first:", stack.sql(CLAIMS))
        assert check(stack, directory, jobs, num_pairs, num_texts) == []
    except BaseException:
        print(stack.log_tails())
        raise


def submit_both(stack: Stack, schema: str, num_pairs: int, num_texts: int) -> list[str]:
    """The ids of both jobs. Each is sent under one key until there is an answer, so that there is one of it."""
    made = []
    for items, model, options in (
        (tiny_tasks.pair_items(num_pairs), tiny_tasks.JUDGE_MODEL, {}),
        (tiny_tasks.text_items(num_texts), tiny_tasks.EXTRACT_MODEL, {"extract_schema": schema}),
    ):
        submit = partial(submit_once, stack, items, model, str(uuid4()), options)
        made.append(wait_for(submit, 120, "the API takes a job"))
    return made


def submit_once(
    stack: Stack, items: list[ItemJson], model: str, key: str, options: dict[str, Any]
) -> str | None:
    with stack.client() as client:
        try:
            job = client.submit(items, model=model, idempotency_key=key, **options)
        except ApiUnreachable:
            return None
        except ApiError as error:
            if error.status not in PASSING:
                raise
            return None
        return str(job["id"])


def read_state(stack: Stack) -> tuple[int, ...]:
    """How many jobs are open and how many items are done; nothing while Postgres is away."""
    with suppress(psycopg.Error):
        ((num_open, num_done),) = stack.sql(STATE)
        return int(str(num_open)), int(str(num_done))
    return ()


def wait_for_progress(stack: Stack) -> None:
    """Until items are done that were not done at the call, or nothing is left to do: a fast machine had done it all."""
    before = wait_for(lambda: read_state(stack), 120, "Postgres answers")

    def goes_on() -> bool:
        now = read_state(stack)
        return bool(now) and (now[0] == 0 or now[1] > before[1])

    wait_for(goes_on, 300, "jobs go on")


def kill(stack: Stack, role: str) -> None:
    """SIGKILL to all processes of the role; `up` starts them again."""
    for victim in find_role(stack, role):
        with suppress(psutil.Error):
            victim.kill()


def check(stack: Stack, directory: Path, jobs: list[str], num_pairs: int, num_texts: int) -> list[str]:
    """What is not as it should be, in sentences. `jobs` are one of pairs and one of texts in turn."""
    broken: list[str] = []
    with stack.client() as client:
        for number, job_id in enumerate(jobs):
            count = num_texts if number % 2 else num_pairs
            job = client.job(job_id)
            told = (job["state"], job["num_items"], job["num_done"], job["num_failed"])
            if told != ("completed", count, count, 0):
                broken.append(f"job {job_id}: {told}, and errors {list(islice(client.errors(job_id), 3))}")
            rows = list(client.results(job_id))
            if len(rows) != count:
                broken.append(f"job {job_id}: {len(rows)} results of {count} keys")
            wrong = (
                tiny_tasks.find_wrong_records(rows)
                if number % 2
                else tiny_tasks.find_wrong_scores(directory, rows)
            )
            if wrong:
                broken.append(f"job {job_id}: {len(wrong)} wrong results, as {wrong[:3]}")
    return broken
