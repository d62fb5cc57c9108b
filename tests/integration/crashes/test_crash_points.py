"""SIGKILL at every step of a submission, a dispatch, a claim and a commit; then another process goes on.

Which steps there are is found out by letting a process live. Real processes, Postgres and Valkey.
"""

from contextlib import closing

import httpx
import pytest
from redis import Redis
from sqlalchemy import Engine, text

from scheduler.dispatcher import Dispatcher
from tests.api_server import NDJSON, api_client, count_jobs, encode_waiting, lines
from tests.database import ask, execute
from tests.integration.crashes.victims import (
    PATIENCE_SECONDS,
    Servers,
    dispatch_once,
    running,
    schedule,
    serve_api,
    work,
)
from tests.promises import Witness, check_items
from tests.protocol import SPEC, claim, complete, dispatch_all, make_items, register_worker, submit
from tests.waiting import wait_for
from vectormill.broker.app import make_app
from vectormill.broker.queues import QueueReader, RedisLossDetector, list_of, publish
from vectormill.jobs.item import Item
from vectormill.jobs.job import DEFAULT_PRIORITY, Job
from vectormill.jobs.jobs import find_job

# A process may take longer to start than a worker is alive without a heartbeat.
KEEP_ALIVE = text("UPDATE vectormill.workers SET heartbeat_at = now() + interval '1 hour'")
AGE_UPLOADS = text(
    "UPDATE vectormill.jobs SET updated_at = now() - interval '1 hour' WHERE state = 'uploading'"
)
LIST_CHUNKS = text("SELECT id FROM vectormill.chunks WHERE job_id = :job_id ORDER BY id")

# Every third step is another process's start and death; `make test-all` takes each.
each_step_or_some = pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 3])


@pytest.fixture
def servers(database_url: str, redis_url: str) -> Servers:
    with closing(Redis.from_url(redis_url)) as redis:
        redis.flushall()
    return Servers(database_url, redis_url)


# -- submission -------------------------------------------------------------------------------------------------------

# With one item a chunk, more than one part: the job is seen as an upload in between.
NUM_ITEMS = 10


def post(client: httpx.Client, number: int) -> httpx.Response:
    """What the client of job `number` sends, and sends again."""
    return client.post(
        "/v1/jobs",
        params={"collection": f"docs_{number}", "dimensions": 8},
        content=lines([{"key": item.key, "text": item.text.decode()} for item in items_of(number)]),
        headers={**NDJSON, "Idempotency-Key": f"job {number}"},
    )


def items_of(number: int) -> list[Item]:
    return make_items(NUM_ITEMS, prefix=f"j{number}-")


def post_to_victim(servers: Servers, number: int, last: int | None) -> list[str]:
    """The points that an API process reached while it served the request; it dies at the point `last`."""
    with running(serve_api, servers, last=last) as victim:
        url = f"http://127.0.0.1:{victim.hear()}"
        with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS, trust_env=False) as client:
            try:
                answer = post(client, number)
                assert answer.status_code == 202, answer.text
            except httpx.TransportError:
                assert last is not None, "the API died of itself"
        victim.process.kill()
        return victim.hear_all()


@pytest.mark.timeout(300)
@each_step_or_some
def test_an_api_killed_at_any_step_of_a_submission_leaves_exactly_one_job_to_the_client_that_repeats_it(
    servers: Servers, engine: Engine, stride: int
) -> None:
    points = post_to_victim(servers, 0, None)
    assert {"before INSERT_JOB", "before INSERT_CHUNK", "before QUEUE_JOB", "after COMMIT"} <= set(points)
    with api_client(engine, chunk_max_items=1) as client:
        for number, last in enumerate(range(0, len(points), stride), start=1):
            point = points[last]
            assert post_to_victim(servers, number, last)[-1] == point
            answer = post(client, number)
            if answer.status_code == 409:  # an upload that is silent for a minute yields its key
                execute(engine, AGE_UPLOADS)
                answer = post(client, number)
            assert answer.status_code == 202, f"killed {point}: {answer.text}"
            again = post(client, number)
            assert again.json()["id"] == answer.json()["id"], f"killed {point}"
            assert count_jobs(engine) == number + 1, f"killed {point}"
            encode_waiting(engine)
            check_items(engine, answer.json()["id"], items_of(number))
    Witness(engine).look()


# -- dispatch ---------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
@each_step_or_some
def test_a_dispatcher_killed_at_any_step_leaves_every_chunk_to_the_next_one(
    servers: Servers, engine: Engine, stride: int
) -> None:
    def dispatch(number: int, last: int | None) -> tuple[Job, list[str]]:
        register_worker(engine, slots=8)
        execute(engine, KEEP_ALIVE)
        job = submit(engine, make_items(6, prefix=f"j{number}-"), chunk_max_items=2)
        with running(dispatch_once, servers, last=last) as victim:
            return job, victim.hear_all()

    job, points = dispatch(0, None)
    assert {"before MARK_QUEUED", "after COMMIT"} <= set(points)
    assert points.count("before PUBLISH") == 3
    is_marked = points.index("after COMMIT", points.index("before MARK_QUEUED"))
    assert points.index("before PUBLISH") > is_marked, "a message must not name a row that is not there"
    take_messages(servers, engine, job)
    for last in range(0, len(points), stride):
        job, reached = dispatch(last + 1, last)
        assert reached[-1] == points[last]
        with (
            closing(RedisLossDetector(servers.redis_url)) as sentinel,
            closing(QueueReader(servers.redis_url)) as queues,
        ):
            second = Dispatcher(engine, make_app(servers.redis_url), sentinel, queues, ageing_seconds=60)
            second.begin_term()
            second.recall_lost_messages()
            second.dispatch()
        take_messages(servers, engine, job)
        check_items(engine, job.id, make_items(6, prefix=f"j{last + 1}-"))
    Witness(engine).look()


def take_messages(servers: Servers, engine: Engine, job: Job) -> None:
    """Encodes what Redis holds messages of, which must be every chunk of the job."""
    dispatched = make_app(servers.redis_url)
    with dispatched.connection_for_read() as connection, engine.connect() as database:
        queue = connection.SimpleQueue(list_of(SPEC.model, DEFAULT_PRIORITY).split("\x06")[0])
        wanted = set(database.execute(LIST_CHUNKS, {"job_id": job.id}).scalars())
        while wanted:
            message = queue.get(timeout=PATIENCE_SECONDS)
            message.ack()
            chunk_id = message.payload[1]["chunk_id"]
            claimed = claim(engine, chunk_id)
            if claimed is not None:  # else it is a duplicate
                complete(engine, claimed)
            wanted.discard(chunk_id)
        queue.clear()


# -- claim and commit -------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
@each_step_or_some
def test_a_worker_killed_at_any_step_between_message_and_ack_leaves_its_chunk_to_others(
    servers: Servers, engine: Engine, stride: int
) -> None:
    jobs: list[tuple[Job, list[Item]]] = []

    def encode(last: int | None) -> list[str]:
        items = [*make_items(2, prefix=f"j{len(jobs)}-"), Item(f"empty {len(jobs)}", b"")]
        jobs.append((submit(engine, items, collection="docs"), items))
        with running(work, servers, last=last) as victim:
            publish(make_app(servers.redis_url), dispatch_all(engine))
            return victim.hear_all(until=lambda point: point == "after ACK")

    points = encode(None)
    assert {"before CLAIM_CHUNK", "before COMMIT_CHUNK", "before UPSERT_ROWS", "before INSERT_ERRORS"} <= set(
        points
    )
    assert {"before COUNT_CHUNK", "before COMMIT", "after COMMIT", "before ACK"} <= set(points)
    for last in range(0, len(points), stride):
        assert encode(last)[-1] == points[last]

    def have_ended() -> bool:
        return all(ask(engine, find_job, job.id).is_terminal for job, _ in jobs)

    with running(schedule, servers, is_watched=False), running(work, servers, is_watched=False):
        wait_for(have_ended, PATIENCE_SECONDS, "every job ended")
    for job, items in jobs:
        check_items(engine, job.id, items)
        ended = ask(engine, find_job, job.id)
        assert (ended.num_done, ended.num_failed) == (2, 1)
    Witness(engine).look()
