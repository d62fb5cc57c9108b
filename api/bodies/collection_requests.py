"""Request bodies that create and change a collection."""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from vectormill.jobs.bodies import OptionsBody
from vectormill.models.registry import DEFAULT_MODEL

KEEP_TEXT_DESCRIPTION: Final = (
    "Keep texts beside their vectors, for full text search, for answers that show them, and to encode "
    "them again without their source."
)
LANGUAGE_DESCRIPTION: Final = (
    "In which full text search reads kept texts: a configuration of Postgres, as german."
)
INDEX_DESCRIPTION: Final = "When there is an HNSW index: auto, from a size on; hnsw, always; none, never."


class IndexOptionsBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The shape of the HNSW index; what is left out is chosen by rows and memory."""

    m: Annotated[int, Meta(ge=2, le=100)] | None = None
    ef_construction: Annotated[int, Meta(ge=4, le=1000)] | None = None
    workers: Annotated[int, Meta(ge=0, le=31)] | None = None
    memory_bytes: Annotated[int, Meta(ge=1 << 20, le=2**41)] | None = None


class CollectionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /v1/collections."""

    name: Annotated[str, Meta(description="That of its SQL view, too.", examples=["docs"])]
    model: str = DEFAULT_MODEL
    options: OptionsBody = msgspec.field(default_factory=OptionsBody)
    keep_text: Annotated[bool, Meta(description=KEEP_TEXT_DESCRIPTION)] = False
    language: Annotated[str, Meta(description=LANGUAGE_DESCRIPTION, examples=["german"])] = "simple"
    index_policy: Annotated[Literal["auto", "hnsw", "none"], Meta(description=INDEX_DESCRIPTION)] = "auto"
    index_options: IndexOptionsBody = msgspec.field(default_factory=IndexOptionsBody)


class CollectionChange(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of PATCH /v1/collections/{name}; what is left out stays."""

    keep_text: Annotated[bool | None, Meta(description=KEEP_TEXT_DESCRIPTION)] = None
    language: Annotated[str | None, Meta(description=LANGUAGE_DESCRIPTION)] = None


COLLECTION_DECODER: Final = msgspec.json.Decoder(CollectionRequest)
CHANGE_DECODER: Final = msgspec.json.Decoder(CollectionChange)
