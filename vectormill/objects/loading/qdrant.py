"""QdrantTarget: a collection of Qdrant, on a server or in a local folder, as the target of a load.

A point's id is the UUID version 5 (RFC 9562) of its key in the namespace of URLs, which is
`uuid.uuid5(uuid.NAMESPACE_URL, key)` in Python. Its payload has the key and the fields of the item's metadata.
"""

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption, SpecMismatch, StorageUnavailable
from vectormill.domain.task import VECTOR
from vectormill.domain.vector_type import FLOAT_TYPES
from vectormill.files.matrices import take_vectors

if TYPE_CHECKING:
    import pyarrow

# A component takes five times as many bytes in the JSON of a request, of which Qdrant accepts 32 MiB.
REQUEST_BYTES: Final = 2 << 20
TIMEOUT_SECONDS: Final = 60
COSINE: Final = "cosine"
DOT: Final = "dot"


@dataclass(frozen=True, slots=True)
class QdrantPlace:
    """A collection, and the server at `url` or the local folder `path` that has it."""

    collection: str
    url: str | None = None
    path: Path | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        if (self.url is None) == (self.path is None):
            raise InvalidOption(
                "Give either --url, a server of Qdrant, or --path, a folder of its local mode."
            )

    @property
    def address(self) -> str:
        return self.url or str(self.path)


@dataclass(frozen=True, slots=True)
class QdrantTarget:
    """An open collection. Every upsert waits until the server has stored it."""

    client: Any
    place: QdrantPlace
    batch_bytes: int = REQUEST_BYTES

    def upsert(self, rows: "pyarrow.RecordBatch") -> None:
        keys = rows.column("key").to_pylist()
        metadata = rows.column("metadata").to_pylist()
        with _translating(self.place):
            self.client.upload_collection(
                self.place.collection,
                vectors=take_vectors(rows).astype(np.float32, copy=False),
                ids=[str(uuid.uuid5(uuid.NAMESPACE_URL, key)) for key in keys],
                payload=[
                    {**json.loads(each or "{}"), "key": key} for key, each in zip(keys, metadata, strict=True)
                ],
                batch_size=rows.num_rows,
                wait=True,
            )


@contextmanager
def open_qdrant(
    place: QdrantPlace, spec: EncodingSpec, distance: str | None = None
) -> Iterator[QdrantTarget]:
    """Open a collection for vectors of a spec, and create it if it is not there.

    The distance of a new collection is cosine for vectors of length 1 and the dot product for others, unless it
    is given. Raise InvalidOption for an output that Qdrant cannot hold, SpecMismatch if the collection has vectors
    of another kind, and StorageUnavailable if Qdrant does not answer or refuses.
    """
    refuse_unfit(spec)
    from qdrant_client import QdrantClient, models

    with _translating(place):
        if place.url is not None:
            client = QdrantClient(
                url=place.url, api_key=place.api_key, timeout=TIMEOUT_SECONDS, check_compatibility=False
            )
        else:
            client = QdrantClient(path=str(place.path))
    try:
        with _translating(place):
            if client.collection_exists(place.collection):
                found = client.get_collection(place.collection).config.params.vectors
                _refuse_other(place, found, spec)
            else:
                chosen = distance or (COSINE if spec.normalize else DOT)
                client.create_collection(
                    place.collection,
                    vectors_config=models.VectorParams(
                        size=spec.dimensions,
                        distance=models.Distance[chosen.upper()],
                        datatype=models.Datatype.FLOAT16 if spec.delivered_type.is_half else None,
                    ),
                )
        yield QdrantTarget(client, place)
    finally:
        client.close()


def refuse_unfit(spec: EncodingSpec) -> None:
    """Raise InvalidOption unless the spec's results are vectors of floats."""
    if spec.result != VECTOR:
        raise InvalidOption(
            f"This output has {spec.result}s and no vectors, and every point of Qdrant has a vector. Load it into "
            "LanceDB or Postgres."
        )
    if not spec.delivered_type.is_float:
        raise InvalidOption(
            f"Qdrant cannot compare the {spec.vector_type} codes of this output. Encode with the vector type "
            f"{' or '.join(FLOAT_TYPES)}; Qdrant quantizes by itself if its collection says so."
        )


def _refuse_other(place: QdrantPlace, found: Any, spec: EncodingSpec) -> None:
    """Raise SpecMismatch unless a collection's vectors are unnamed and have the dimensions of the spec."""
    size = getattr(found, "size", None)
    if size is None:
        raise SpecMismatch(
            f"The collection {place.collection} of {place.address} has no unnamed vector. Load into another one."
        )
    if size != spec.dimensions:
        raise SpecMismatch(
            f"The collection {place.collection} of {place.address} has vectors of {size:,} dimensions, and this "
            f"output has {spec.dimensions:,}. Load into another one."
        )


@contextmanager
def _translating(place: QdrantPlace) -> Iterator[None]:
    """Raise StorageUnavailable for the errors that Qdrant's client raises when its server or folder refuses."""
    from qdrant_client.http.exceptions import ApiException, UnexpectedResponse

    try:
        yield
    except UnexpectedResponse as error:
        reason = (error.content or b"").decode("utf-8", "replace").strip() or error.reason_phrase
        raise StorageUnavailable(
            f"Qdrant at {place.address} answers {error.status_code}: {reason[:500]}"
        ) from error
    except (ApiException, RuntimeError, OSError) as error:
        reason = getattr(error, "source", None) or error
        raise StorageUnavailable(f"Qdrant at {place.address} cannot be used: {reason}") from error
