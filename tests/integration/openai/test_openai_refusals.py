"""Refusals for a missing key or a limit raise the exceptions that the official client has for them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import httpx
import openai
import pytest
from sqlalchemy import Engine

from tests.api_server import api_client
from tests.queries import listening
from vectormill.keys import api_keys
from vectormill.keys.api_key import make_secret
from vectormill.keys.api_keys import create_key
from vectormill.models.registry import DEFAULT_MODEL
from worker.engine.request import EncodeRequest

WRONG = "vmk_wrong"


@pytest.fixture
def api(engine: Engine, redis_url: str) -> Iterator[httpx.Client]:
    """One that has room for one search."""
    with api_client(engine, max_searches=1, redis_url=redis_url) as client:
        yield client


def opened(api: httpx.Client, key: str = WRONG) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api.base_url}/v1", api_key=key, max_retries=0)


def ask(client: openai.OpenAI, text: str = "text") -> openai.types.CreateEmbeddingResponse:
    return client.embeddings.create(model=DEFAULT_MODEL, input=[text, "other"], dimensions=8)


def test_what_comes_on_top_is_told_when_to_come_again(api: httpx.Client, redis_url: str) -> None:
    is_asked, may_answer = Event(), Event()

    def hold(_: EncodeRequest) -> None:
        is_asked.set()
        assert may_answer.wait(100)

    with opened(api) as client, listening(redis_url, hold), ThreadPoolExecutor(1) as clients:
        first = clients.submit(ask, client)
        assert is_asked.wait(100)
        with pytest.raises(openai.RateLimitError, match="VECTORMILL_MAX_SEARCHES") as refused:
            ask(client)
        assert (refused.value.type, refused.value.code) == ("rate_limit_error", "rate_limit_exceeded")
        assert refused.value.response.headers["retry-after"]
        may_answer.set()
        answer = first.result()
    assert [len(each.embedding) for each in answer.data] == [8, 8]
    assert answer.usage.prompt_tokens > 0


def test_a_key_that_opens_nothing_raises_an_authentication_error(
    api: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "FRESH_SECONDS", 0.0)
    secret = make_secret()
    with engine.begin() as connection:
        create_key(connection, "me", secret, "read", None)
    with opened(api) as stranger:
        with pytest.raises(openai.AuthenticationError, match="Unknown API key") as refused:
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
