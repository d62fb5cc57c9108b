"""The operation that quotes a source. Its rows are read by the service, so it needs a key of the scope sources."""

from typing import Final

from vectormill.keys.api_key import SOURCES
from vectormill.operation import Operation
from vectormill.quotes.bodies import QuoteBody, QuoteRequest

QUOTE: Final = Operation(
    "POST", "/v1/quotes", SOURCES, QuoteBody, QuoteRequest,
    example={
        "kind": "sql",
        "options": {"query": "SELECT id, body FROM articles", "key": "id", "text": "body", "url_env": "ARTICLES_URL"},
        "collection": "articles",
    },
)  # fmt: skip
