"""Many requests with one Idempotency-Key at the same moment, over HTTP: one job, whoever is asked and however often."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import httpx
import pytest
from sqlalchemy import Engine

from tests.api_server import NDJSON, SMALL, api_client, count_jobs, encode_waiting, lines, many
from tests.promises import Witness

NUM_POSTS = 50
PATIENCE_SECONDS = 60.0


@pytest.mark.parametrize("is_stream", [False, True], ids=["object", "stream"])
def test_fifty_posts_at_once_with_one_key_are_one_job(engine: Engine, is_stream: bool) -> None:
    items = many(20)  # of one item a chunk: a stream is written in parts
    ready = Barrier(NUM_POSTS)

    def post(client: httpx.Client) -> list[httpx.Response]:
        """Asks until it is told a job: 409 says that another request with the key is being received."""
        answers: list[httpx.Response] = []
        ready.wait(PATIENCE_SECONDS)
        while not answers or answers[-1].status_code in (409, 429):
            assert len(answers) < 1000, "the key was never free"
            if is_stream:
                sent = {
                    "params": {"dimensions": 8},
                    "content": lines(items),
                    "headers": {**NDJSON, "Idempotency-Key": "k"},
                }
            else:
                sent = {"json": {"items": items, "options": SMALL}, "headers": {"Idempotency-Key": "k"}}
            answers.append(client.post("/v1/jobs", **sent))  # type: ignore[arg-type]
        return answers

    # Two API processes, as behind a load balancer.
    with (
        api_client(engine, chunk_max_items=1) as one,
        api_client(engine, chunk_max_items=1) as other,
        ThreadPoolExecutor(NUM_POSTS) as clients,
    ):
        one.timeout = other.timeout = httpx.Timeout(PATIENCE_SECONDS)
        asked = list(clients.map(post, [one, other] * (NUM_POSTS // 2)))
        answers = [answer for several in asked for answer in several]
        assert {answer.status_code for answer in answers} <= {202, 409, 429}, "nobody is told of a fault"
        jobs = {several[-1].json()["id"] for several in asked}
        assert len(jobs) == 1
        assert count_jobs(engine) == 1
        encode_waiting(engine)
        ended = one.get(f"/v1/jobs/{jobs.pop()}").json()
    assert (ended["state"], ended["num_done"], ended["num_chunks"]) == ("completed", 20, 20)
    Witness(engine).look()
