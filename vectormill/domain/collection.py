"""Collection: a named set of vectors, read through a SQL view of the same name; and its generations."""

import re
from dataclasses import dataclass
from typing import Final

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption

BUILDING: Final = "building"
LIVE: Final = "live"
RETIRED: Final = "retired"

GENERATION_STATES: Final = (BUILDING, LIVE, RETIRED)

# A lower-case SQL identifier, so that `SELECT … FROM docs` needs no quotes; Postgres keeps 63 bytes of a name.
COLLECTION_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")


@dataclass(frozen=True, slots=True)
class Generation:
    """One build of a collection with one EncodingSpec, in a table of its own."""

    id: int
    collection: str
    spec: EncodingSpec
    table_name: str
    state: str


def check_collection_name(name: str) -> str:
    """The name itself, if a SQL view may carry it; InvalidOption with the rule otherwise."""
    if not COLLECTION_NAME.fullmatch(name):
        raise InvalidOption(
            f"The collection name {name!r} cannot be used: it becomes a SQL view, so it must start with a lower-case "
            "letter or underscore, and have only lower-case letters, digits and underscores, at most 63."
        )
    return name
