"""The packaged model as run by sentence-transformers, whose vectors our own are compared with."""

import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.models.registry import find_packaged_model

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

TEXTS: Final = (
    "The mill grinds slowly.",
    "Zwölf Boxkämpfer jagen Viktor.",
    "def parse(date): ...",
    "東京タワー",
    "I do not know, he said; it's unaffable!",
    *(f"A windmill of {number} sails grinds grain into flour." for number in range(60)),
)
PROMPTED: Final = tuple(f"query: {text}" for text in TEXTS[:5])
STORED: Final = Path(__file__).parent / "data" / "packaged" / "vectors.npy"


def known_vectors(texts: Sequence[str] = TEXTS) -> NDArray[np.float32]:
    """Return the stored vectors of some of TEXTS and PROMPTED: to load the model with its library takes seconds."""
    places = [(*TEXTS, *PROMPTED).index(text) for text in texts]
    vectors: NDArray[np.float32] = np.load(STORED)[places].astype(np.float32)
    return vectors


@cache
def packaged_reference() -> "SentenceTransformer":
    """Load the packaged model with sentence-transformers, once per process.

    The import is inside because it takes 4 s, and every test process collects all files.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(find_packaged_model()), device="cpu", local_files_only=True)
