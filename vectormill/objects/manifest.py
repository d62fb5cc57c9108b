"""Manifest: which parts of a job's output count, and which columns they have. Knows nothing of Postgres."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import NotFound, ObjectChanged
from vectormill.extras import require
from vectormill.files.roots import ANYWHERE, Roots
from vectormill.objects.store import describe_object, normalize, read_range

if TYPE_CHECKING:
    import pyarrow

MANIFEST: Final = "_manifest.json"
MANIFEST_VERSION: Final = 1
# The extra with all that reading an output needs.
READING: Final = "dataframes"


@dataclass(frozen=True, slots=True)
class OutputPart:
    """A part, or a staged one. `name` is relative to the output's folder, and sorts by `first_item`."""

    name: str
    first_item: int
    num_rows: int
    num_bytes: int


class Manifest(Struct, frozen=True, kw_only=True):
    """The content of `_manifest.json`: the job, the spec that made its results, and the parts that count."""

    version: int = MANIFEST_VERSION
    job_id: str
    state: str
    spec: dict[str, Any]
    num_items: int
    num_rows: int
    num_failed: int
    metadata: dict[str, Any]
    finished_at: str
    parts: list[OutputPart]


def read_manifest(url: str) -> Manifest:
    """Return the manifest of a job's output.

    `url` is the folder that the job was given. Raise NotFound while there is no manifest, because the job has not
    ended or never wrote there, and StorageUnavailable.
    """
    return read_manifest_below(url, ANYWHERE)


def read_manifest_below(url: str, roots: Roots) -> Manifest:
    """Return the manifest of a job's output, whose folder, if it is local, lies beneath the roots."""
    require("obstore", extra=READING)
    folder = normalize(url)
    try:
        found = describe_object(f"{folder}/{MANIFEST}", roots)
    except ObjectChanged as error:
        raise NotFound(f"{folder} has no {MANIFEST}: it is written when the job has ended.") from error
    content = read_range(found.url, found.tag, 0, found.num_bytes)
    return msgspec.json.decode(content, type=Manifest)


def make_part_schema(spec: EncodingSpec) -> "pyarrow.Schema":
    """Return the columns of a job's parts, which are the same whether or not the items of a part have metadata."""
    import pyarrow as pa

    from vectormill.files.result_tables import RESULT_TABLES

    return pa.schema(
        [
            pa.field("key", pa.string(), nullable=False),
            pa.field("content_hash", pa.binary(16), nullable=False),
            *RESULT_TABLES[spec.result].fields(spec),
            pa.field("metadata", pa.string()),
        ]
    )
