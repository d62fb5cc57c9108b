"""Encode in clusters that exist already: Ray, Daft and Spark, without a service of Vectormill.

Each module is for one of them, and needs the extra of that name on every machine that encodes. What encodes is the
LocalEncoder of `worker`, which can also be used by itself.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vectormill.extras import require

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from worker.local import EncodedVectors
    from worker.local import LocalEncoder as LocalEncoder
else:

    def __getattr__(name: str) -> object:
        """Import LocalEncoder on first access, since it needs the packages of a worker."""
        if name != "LocalEncoder":
            raise AttributeError(f"module 'vectormill.integrations' has no attribute {name!r}")
        require("tokenizers", extra="worker")

        from worker.local import LocalEncoder

        return LocalEncoder


def warn_of_failures(reasons: Sequence[str | None]) -> None:
    """Log how many texts have no vector, and why the first of them has none. Log nothing if all have one."""
    failed = [reason for reason in reasons if reason is not None]
    if failed:
        logger.warning("%d of %d texts have no vector; the first: %s", len(failed), len(reasons), failed[0])


def make_arrow_column(encoded: "EncodedVectors") -> Any:
    """Return the vectors as an array of Arrow whose type has their length; null for a text without a vector."""
    import numpy as np
    import pyarrow as pa

    is_missing = np.zeros(len(encoded.vectors), dtype=np.bool_)
    is_missing[list(encoded.failures)] = True
    values = pa.array(encoded.vectors.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(values, encoded.vectors.shape[1], mask=pa.array(is_missing))
