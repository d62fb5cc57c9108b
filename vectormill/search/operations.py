"""The HTTP operation that searches a collection."""

from typing import Final

from vectormill.keys.api_key import READ
from vectormill.operation import Operation
from vectormill.search.bodies import ManySearchesAnswer, SearchAnswer, SearchRequest

# A search is not retried, since the server itself waits for a worker for VECTORMILL_SEARCH_TIMEOUT_SECONDS.
SEARCH: Final = Operation(
    "POST", "/v1/collections/{name}/search", READ, SearchAnswer, SearchRequest,
    other_answer=ManySearchesAnswer, is_repeatable=False, is_slow=True,
    examples={
        "one": {"text": "how to parse a date", "limit": 3},
        "filtered": {"text": "dates", "filter": {"lang": "de", "year": {"gte": 2020}}},
        "many": {"queries": [{"text": "dates"}, {"more_like": "json.dumps"}]},
    },
)  # fmt: skip
