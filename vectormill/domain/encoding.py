"""EncodingSpec: everything that decides which vector a text gets. Same spec, same vector space."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Final

# What becomes of a text of more than max_tokens.
TRUNCATE: Final = (
    "truncate"  # its first tokens decide the vector; the text is counted and its key can be listed
)
FAIL: Final = "fail"  # it becomes an item error
PASSAGES: Final = "passages"  # overlapping windows of it are encoded, and their vectors averaged

LONG_TEXT_POLICIES: Final = (TRUNCATE, FAIL, PASSAGES)
# Of max_tokens. It costs a seventh more tokens; a sentence of usual length lies whole in one of two neighbours.
DEFAULT_PASSAGE_OVERLAP_SHARE: Final = 1 / 8
# The numbers of which a vector is kept and delivered.
FLOAT32: Final = "float32"
FLOAT16: Final = "float16"
INT8: Final = "int8"  # codes of ranges that are measured once for a vector space
BINARY: Final = "binary"  # one bit a value: whether it is above 0

VECTOR_TYPES: Final = (FLOAT32, FLOAT16, INT8, BINARY)
# What `pooling` is followed by in JSON and in the fingerprint of a spec with passages; then comes the overlap.
_PASSAGES_SUFFIX: Final = "/passages:"
# The same, in JSON only, of a spec that names its vector type.
_VECTOR_TYPE_SUFFIX: Final = "/vectors:"


@dataclass(frozen=True, slots=True)
class EncodingSpec:
    """How texts become vectors; a value, compared and hashed by content.

    `dimensions` is the length of the stored vector; when it is smaller than the model's own, the leading values
    are kept (Matryoshka) and normalized again if `normalize` is set. `prompt` is the literal text put before every
    item, never the name of a prompt. `max_tokens` counts the special tokens and the prompt's. What becomes of longer
    texts `long_texts` says, one of LONG_TEXT_POLICIES; `passage_overlap` is in tokens, and 0 without passages.
    `vector_type` is one of VECTOR_TYPES; None is float16 in a collection, and float32 elsewhere.
    """

    model: str
    revision: str
    pooling: str
    normalize: bool
    dimensions: int
    prompt: str
    max_tokens: int
    long_texts: str = TRUNCATE
    passage_overlap: int = 0
    vector_type: str | None = None

    def vector_space(self) -> dict[str, Any]:
        """What the fingerprint is made of. Its bytes never change for a spec that an earlier release could write.

        Passages give long texts other vectors, so they are told, as part of the pooling. Cutting and failing only
        decide which texts get a vector. float16 is what a collection keeps unless it is told otherwise.
        """
        space = {
            "model": self.model,
            "revision": self.revision,
            "pooling": self.pooling + self._pooling_suffix(),
            "normalize": self.normalize,
            "dimensions": self.dimensions,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
        }
        return space if self.vector_type in (None, FLOAT16) else {**space, "vector_type": self.vector_type}

    def fingerprint(self) -> str:
        """Sixteen hex digits that name the vector space."""
        text = json.dumps(self.vector_space(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def content(self) -> dict[str, Any]:
        """All that decides the outcome of a job, in the form an Idempotency-Key's hash has always been taken of."""
        content = {**self.vector_space(), "truncate": self.long_texts != FAIL}
        return content if self.vector_type is None else {**content, "vector_type": self.vector_type}

    def to_json(self) -> dict[str, Any]:
        """What is stored and shown.

        A worker of a release without passages knows `truncate` only, and would cut; one without vector types would
        write another type. It finds a pooling that its model does not have, and hands the chunk back to a worker that
        can.
        """
        values = {**asdict(self), **self.content()}
        if self.vector_type is not None:
            values["pooling"] += _VECTOR_TYPE_SUFFIX + self.vector_type
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "EncodingSpec":
        """Reads what any release wrote: the first one knew `truncate` only; what is not known is passed over."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        known["pooling"] = values["pooling"].partition("/")[0]  # the suffixes repeat what fields say
        known.setdefault("long_texts", TRUNCATE if values.get("truncate", True) else FAIL)
        return cls(**known)

    def _pooling_suffix(self) -> str:
        return f"{_PASSAGES_SUFFIX}{self.passage_overlap}" if self.long_texts == PASSAGES else ""
