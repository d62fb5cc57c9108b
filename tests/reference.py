"""The packaged model as run by sentence-transformers, whose vectors our own are compared with."""

import warnings
from functools import cache
from typing import TYPE_CHECKING

from vectormill.models.registry import find_packaged_model

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


@cache
def packaged_reference() -> "SentenceTransformer":
    """Load the packaged model with sentence-transformers, once per process.

    The import is inside because it takes 4 s, and every test process collects all files.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(find_packaged_model()), device="cpu", local_files_only=True)
