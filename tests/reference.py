"""The packaged model as sentence-transformers itself runs it: what our vectors are compared with."""

import warnings
from functools import cache
from typing import TYPE_CHECKING

from vectormill.models.registry import find_packaged_model

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


@cache
def packaged_reference() -> "SentenceTransformer":
    """Loaded once a process. The import is here because it takes 4 s, and every process of tests collects all files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(find_packaged_model()), device="cpu", local_files_only=True)
