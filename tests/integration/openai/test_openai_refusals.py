"""What the door and the limits refuse raises what the official client knows; without Redis a job serves."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from sqlalchemy import Engine

from tests.api_server import api_client, count_jobs, encode_waiting
from tests.waiting import wait_for
from vectormill.keys import keyring
from vectormill.keys.api_key import make_secret
from vectormill.keys.api_keys import create_key
from vectormill.models.registry import DEFAULT_MODEL

WRONG = "vmk_wrong"


@pytest.fixture
def api(engine: Engine) -> Iterator[httpx.Client]:
    """Without a Redis, and with room for one search."""
    with api_client(engine, max_searches=1) as client:
        yield client


def opened(api: httpx.Client, key: str = WRONG) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api.base_url}/v1", api_key=key, max_retries=0)


def ask(client: openai.OpenAI, text: str = "text") -> openai.types.CreateEmbeddingResponse:
    return client.embeddings.create(model=DEFAULT_MODEL, input=[text, "other"], dimensions=8)


def test_what_comes_on_top_is_told_when_to_come_again_and_a_job_serves_without_redis(
    api: httpx.Client, engine: Engine
) -> None:
    with opened(api) as client, ThreadPoolExecutor(1) as clients:
        first = clients.submit(ask, client)
        wait_for(lambda: count_jobs(engine) == 1, because="the first waits for its vectors")
        with pytest.raises(openai.RateLimitError, match="VECTORMILL_MAX_SEARCHES") as refused:
            ask(client)
        assert (refused.value.type, refused.value.code) == ("rate_limit_error", "rate_limit_exceeded")
        assert refused.value.response.headers["retry-after"]
        encode_waiting(engine)
        answer = first.result()
    assert [len(each.embedding) for each in answer.data] == [8, 8]
    assert answer.usage.prompt_tokens > 0
    assert count_jobs(engine) == 0


def test_a_key_that_opens_nothing_raises_an_authentication_error(
    api: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring, "FRESH_SECONDS", 0.0)
    secret = make_secret()
    with engine.begin() as connection:
        create_key(connection, "me", secret, "read", None)
    with opened(api) as stranger:
        with pytest.raises(openai.AuthenticationError, match="opens nothing") as refused:
            ask(stranger)
        assert refused.value.code == "invalid_api_key"
        assert refused.value.request_id
    with opened(api, secret) as friend:
        assert [model.id for model in friend.models.list()] == [DEFAULT_MODEL]
        with pytest.raises(openai.PermissionDeniedError, match="scope"):
            friend.files.delete("file-1")


def test_without_a_worker_the_official_client_is_told_that_the_service_is_away(
    engine: Engine, redis_url: str
) -> None:
    with api_client(engine, redis_url=redis_url, search_timeout_seconds=0.3) as api, opened(api) as client:
        with pytest.raises(openai.InternalServerError, match="No worker") as refused:
            ask(client)
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"]
