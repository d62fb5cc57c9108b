"""A client of HTTP and the official client, both of an API on the test's own database."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.request_batches import official_client


@pytest.fixture
def client(http: httpx.Client) -> Iterator[openai.OpenAI]:
    with official_client(http) as client:
        yield client
