"""Operations on collections, their generations, indexes and items."""

from dataclasses import replace
from typing import Final

from vectormill.collections.bodies import (
    CollectionChange,
    CollectionDetail,
    CollectionExportQuery,
    CollectionPage,
    CollectionRequest,
    CollectionsQuery,
    DeleteAnswer,
    DeleteRequest,
    DeletionQuery,
    DescriptionQuery,
    IndexBody,
    IndexRequest,
    ItemAnswer,
    KeptItemByKeyQuery,
    KeptItemQuery,
    OneItemQuery,
    PutAnswer,
    PutByKeyQuery,
    PutQuery,
    PutRequest,
    RollbackAnswer,
    RollbackQuery,
)
from vectormill.files.formats import OUTPUT_FORMATS
from vectormill.keys.api_key import READ, WRITE
from vectormill.operation import NO_CONTENT, Nothing, Operation
from vectormill.runs.bodies import RunBody

ALL: Final = "/v1/collections"
ONE: Final = "/v1/collections/{name}"
INDEX: Final = ONE + "/index"
ITEMS: Final = ONE + "/items"
# The router parses the key with the path convertor `item_key`, since a key may contain any character.
ITEM: Final = ITEMS + "/{key:item_key}"

LIST: Final = Operation("GET", ALL, READ, CollectionPage, query=CollectionsQuery)
SHOW: Final = Operation("GET", ONE, READ, CollectionDetail, query=DescriptionQuery)
# A create is not retried: a second attempt would be refused, since the first has taken the name.
CREATE: Final = Operation(
    "POST", ALL, WRITE, CollectionDetail, CollectionRequest, status=201, is_repeatable=False,
    example={"name": "docs", "keep_text": True, "language": "english"},
)  # fmt: skip
CHANGE: Final = Operation(
    "PATCH", ONE, WRITE, CollectionDetail, CollectionChange, example={"keep_text": True}
)
DELETE: Final = Operation("DELETE", ONE, WRITE, Nothing, query=DeletionQuery, status=NO_CONTENT)
EXPORT: Final = Operation(
    "GET", ONE + "/export", READ, Nothing, query=CollectionExportQuery,
    media_types=tuple(each.media_type for each in OUTPUT_FORMATS.values() if each.has_keys),
)  # fmt: skip

# A rollback is not retried: a second one would undo the first.
ROLL_BACK: Final = Operation(
    "POST", ONE + "/rollback", WRITE, RollbackAnswer, query=RollbackQuery, is_repeatable=False
)
DISCARD: Final = Operation(
    "DELETE", ONE + "/generations/{generation_id}", WRITE, Nothing, status=NO_CONTENT, is_repeatable=False
)

SHOW_INDEX: Final = Operation("GET", INDEX, READ, IndexBody)
# A change of indexes is not retried: a second attempt would queue a second run.
CHANGE_INDEX: Final = Operation(
    "PUT", INDEX, WRITE, RunBody, IndexRequest, status=202, location="/v1/runs/{id}", is_repeatable=False,
    example={"policy": "auto", "filters": ["lang", "year"]},
)  # fmt: skip

SHOW_ITEM: Final = Operation("GET", ITEMS, READ, ItemAnswer, query=KeptItemByKeyQuery)
PUT_ITEM: Final = Operation(
    "PUT", ITEMS, WRITE, PutAnswer, PutRequest, query=PutByKeyQuery, other_status=202,
    example={"text": "A text to encode.", "metadata": {"page": 1}},
)  # fmt: skip
DELETE_ITEM: Final = Operation(
    "DELETE", ITEMS, WRITE, Nothing, query=OneItemQuery, status=NO_CONTENT, skips_confirmation=True
)
# The same with the key in the path, for keys that no client changes there.
SHOW_ITEM_AT: Final = replace(SHOW_ITEM, path=ITEM, query=KeptItemQuery)
PUT_ITEM_AT: Final = replace(PUT_ITEM, path=ITEM, query=PutQuery)
DELETE_ITEM_AT: Final = replace(DELETE_ITEM, path=ITEM, query=Nothing)
DELETE_ITEMS: Final = Operation(
    "POST", ITEMS + ":delete", WRITE, DeleteAnswer, DeleteRequest, example={"keys": ["a", "b"]}
)
