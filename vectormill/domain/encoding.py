"""EncodingSpec: everything that decides which vector a text gets. Same spec, same vector space."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EncodingSpec:
    """How texts become vectors; a value, compared and hashed by content.

    `dimensions` is the length of the stored vector; when it is smaller than the model's own, the leading values
    are kept (Matryoshka) and normalized again if `normalize` is set. `prompt` is the literal text put before every
    item, never the name of a prompt. `max_tokens` counts the special tokens. Longer texts are cut when `truncate`
    is set and become item errors otherwise.
    """

    model: str
    revision: str
    pooling: str
    normalize: bool
    dimensions: int
    prompt: str
    max_tokens: int
    truncate: bool

    def fingerprint(self) -> str:
        """Sixteen hex digits that name the vector space. `truncate` only decides which texts get a vector."""
        values = asdict(self)
        del values["truncate"]
        return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "EncodingSpec":
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})
