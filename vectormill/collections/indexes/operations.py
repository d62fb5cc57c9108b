"""Operations on the indexes of a collection."""

from typing import Any, Final

from vectormill.collections.indexes.bodies import IndexBody, IndexRequest
from vectormill.keys.api_key import READ, WRITE
from vectormill.operation import Operation
from vectormill.runs.bodies import RunBody

ONE: Final = "/v1/collections/{name}/index"

SHOW: Final = Operation("GET", ONE, READ, IndexBody)
# Not repeated: the second attempt would make a second run.
CHANGE: Final = Operation(
    "PUT", ONE, WRITE, RunBody, IndexRequest, status=202, location="/v1/runs/{id}", is_repeatable=False,
    example={"policy": "auto", "filters": ["lang", "year"]},
)  # fmt: skip

OPERATIONS: Final[tuple[Operation[Any], ...]] = (SHOW, CHANGE)
