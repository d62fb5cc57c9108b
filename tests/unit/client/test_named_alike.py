"""What can be said of a search, a schedule, a collection or a webhook is said alike to API, client and command line.

Options of encoding have a table of their own: tests/unit/domain/test_options.py.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vectormill import Client
from vectormill.batches.endpoints import RerankRequest
from vectormill.cli import collections, schedules, searches, webhooks
from vectormill.collections.operations import CollectionChange, CollectionRequest
from vectormill.schedules.operations import ScheduleChange, ScheduleRequest
from vectormill.search.operations import SearchQuery
from vectormill.webhooks.operations import WebhookChange, WebhookRequest

# Of every command and every call, whatever it says.
OF_ALL = {"self", "client", "api_url", "data_dir", "json"}


@dataclass(frozen=True, slots=True)
class Words:
    """The body that the API takes, the call that sends it and the command.

    `unsaid` fields have no flag, `named` flags are called otherwise, arguments `beside` these are no field.
    """

    body: Any
    call: Callable[..., Any]
    command: Callable[..., Any] | None = None
    unsaid: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()


WORDS = {
    "search": Words(
        SearchQuery,
        Client.search,
        searches.search,
        unsaid=("embedding", "sparse", "multi_vector"),  # many numbers
        named={"more_like": "like", "group_by": "by_document"},
        beside=("collection",),
    ),
    "rerank": Words(RerankRequest, Client.rerank),
    "create a schedule": Words(
        ScheduleRequest,
        Client.create_schedule,
        schedules.create,
        beside=("source", "split", "key", "text", "text_pair", "metadata"),  # of a source that is set first
    ),
    "change a schedule": Words(
        ScheduleChange, Client.change_schedule, schedules.change, beside=("name", "schedule")
    ),
    "create a collection": Words(
        CollectionRequest,
        Client.create_collection,
        collections.create,
        # The shape of an HNSW index is told to `collections index` alone.
        named={"index_options": "multi_vector_codes", "index_policy": "index", "name": "collection"},
    ),
    "change a collection": Words(
        CollectionChange, Client.change_collection, collections.change, beside=("name", "collection")
    ),
    "create a webhook": Words(
        WebhookRequest,
        Client.create_webhook,
        webhooks.create,
        named={"events": "event"},
        beside=("idempotency_key",),
    ),
    "change a webhook": Words(
        WebhookChange,
        Client.change_webhook,
        webhooks.change,
        named={"events": "event", "is_enabled": "enable"},
        beside=("webhook", "webhook_id"),
    ),
}


def fields_of(body: Any) -> set[str]:
    return set(getattr(body, "model_fields", None) or body.__struct_fields__)


def arguments_of(call: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(call).parameters) - OF_ALL


def test_a_call_of_the_client_takes_what_the_api_takes() -> None:
    for words in WORDS.values():
        # Of mode, what Voyage calls top_n and long_texts, and what Cohere's clients send without an effect.
        other_names = {"hybrid", "top_k", "truncation", "rank_fields"}
        assert arguments_of(words.call) - set(words.beside) == fields_of(words.body) - other_names


def test_a_command_takes_what_the_api_takes() -> None:
    for words in [each for each in WORDS.values() if each.command]:
        assert words.command is not None
        expected = {words.named.get(name, name) for name in fields_of(words.body) - set(words.unsaid)}
        assert arguments_of(words.command) - (set(words.beside) - expected) == expected
