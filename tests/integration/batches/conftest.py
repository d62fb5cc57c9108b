"""A client of HTTP and the official client, both of an API on the test's own database."""

from collections.abc import Iterator

import httpx
import openai
import pytest
from sqlalchemy import Engine

from tests.api_server import api_client
from tests.request_batches import official_client


@pytest.fixture
def http(engine: Engine) -> Iterator[httpx.Client]:
    with api_client(engine) as client:
        yield client


@pytest.fixture
def client(http: httpx.Client) -> Iterator[openai.OpenAI]:
    with official_client(http) as client:
        yield client
