"""RequestFile: a file of requests that a client uploaded, or that a request batch answered with. Knows no bytes."""

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from vectormill.domain.errors import RequestFileNotFound
from vectormill.domain.states import States

UPLOADING: Final = "uploading"
PROCESSED: Final = "processed"
# Nobody meets it: such a file is not found any more, and its parts are being removed.
DELETING: Final = "deleting"

REQUEST_FILE_STATES: Final = States((UPLOADING, PROCESSED, DELETING))

# The purposes of files that a client uploads, and of those that a batch makes.
BATCH: Final = "batch"
BATCH_OUTPUT: Final = "batch_output"
PURPOSES: Final = (BATCH, BATCH_OUTPUT)

_ID: Final = re.compile(r"file-([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class RequestFile:
    """`batch_id` is the batch whose job the content is made of whenever it is read; None: the content is stored."""

    id: UUID
    seq: int
    purpose: str
    filename: str
    num_bytes: int
    created_at: datetime
    expires_at: datetime | None
    batch_id: UUID | None = None

    @property
    def name(self) -> str:
        """The id as clients have it."""
        return name_file(self.id)


def name_file(file_id: UUID) -> str:
    return f"file-{file_id.hex}"


def parse_file_name(name: str) -> UUID:
    """The id that clients call so. Raises RequestFileNotFound: what is none is no file's."""
    found = _ID.fullmatch(name)
    if found is None:
        raise RequestFileNotFound
    return UUID(found[1])
