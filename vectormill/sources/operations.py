"""Operations on sources, pushes and followed tables.

A source makes the server read the files and databases that it can reach, and following a table creates
triggers on a user's table. Both therefore need a key of the scope sources.
"""

from typing import Final

from vectormill.jobs.bodies import LINES_EXAMPLE, ItemBody
from vectormill.keys.api_key import READ, SOURCES, WRITE
from vectormill.operation import NO_CONTENT, Nothing, Operation
from vectormill.sources.bodies import (
    FollowingBody,
    FollowRequest,
    PushBody,
    PushQuery,
    SourceBody,
    SourceCheckBody,
    SourceQuery,
    SourceRequest,
)

ONE: Final = "/v1/collections/{name}/source"

SET: Final = Operation(
    "PUT", ONE, SOURCES, SourceBody, SourceRequest, query=SourceQuery,
    example={
        "kind": "sql",
        "options": {
            "query": "SELECT id, body, lang FROM articles",
            "key": "id",
            "text": "body",
            "metadata": ["lang"],
            "url_env": "ARTICLES_URL",
        },
        "split": {"by": "paragraphs"},
    },
)  # fmt: skip
SHOW: Final = Operation("GET", ONE, READ, SourceBody)
DELETE: Final = Operation("DELETE", ONE, SOURCES, Nothing, status=NO_CONTENT)
CHECK: Final = Operation("POST", ONE + "/check", SOURCES, SourceCheckBody)
FOLLOWING: Final = Operation("GET", ONE + "/following", READ, FollowingBody)
FOLLOW: Final = Operation(
    "POST", ONE + "/follow", SOURCES, FollowingBody, FollowRequest,
    example={"table": "public.papers", "key_column": "id"},
)  # fmt: skip
UNFOLLOW: Final = Operation("POST", ONE + "/unfollow", SOURCES, FollowingBody)
PUSH: Final = Operation(
    "POST", "/v1/collections/{name}/push", WRITE, PushBody, query=PushQuery, line=ItemBody, line_example=LINES_EXAMPLE,
    status=202, location="/v1/runs/{run}",
)  # fmt: skip
