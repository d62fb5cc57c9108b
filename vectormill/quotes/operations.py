"""The operation that quotes a source, whose rows are read by the service, so that it needs a key of scope sources."""

from typing import Final

import msgspec

from vectormill.domain.encoding import DEFAULT_MODEL
from vectormill.jobs.job import DEFAULT_PRIORITY
from vectormill.jobs.operations import CollectionName, OptionsBody, Priority, QuoteBody
from vectormill.keys.api_key import SOURCES
from vectormill.operation import Operation
from vectormill.sources.operations import SourceRequest


class QuoteRequest(SourceRequest, forbid_unknown_fields=True):
    """A source of rows, and how they would be encoded."""

    model: str = DEFAULT_MODEL
    collection: CollectionName = None
    priority: Priority = DEFAULT_PRIORITY
    encoding: OptionsBody = msgspec.field(default_factory=OptionsBody)


QUOTE: Final = Operation(
    "POST", "/v1/quotes", SOURCES, QuoteBody, QuoteRequest, is_slow=True,
    example={
        "kind": "sql",
        "options": {"query": "SELECT id, body FROM articles", "key": "id", "text": "body", "url_env": "ARTICLES_URL"},
        "collection": "articles",
    },
)  # fmt: skip
