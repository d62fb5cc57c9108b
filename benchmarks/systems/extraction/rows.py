"""Rows of what an extraction answers, so that those of two systems can be compared as vectors are."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES: Final = 16


def digest_records(records: Sequence[Any]) -> NDArray[np.float32]:
    """A row for each text: the digest of its records, byte by byte. Equal rows are equal records. [n, DIGEST_BYTES]"""
    digests = [
        hashlib.blake2b(json.dumps(each, ensure_ascii=False).encode(), digest_size=DIGEST_BYTES).digest()
        for each in records
    ]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES).astype(np.float32)
