"""The registry entry of a model: where it is, and with which options it is used."""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

# Two special tokens and one of the text: with fewer, every text has the same vector.
SMALLEST_MAX_TOKENS: Final = 3


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """The location of a registered model, and the options with which it is used.

    Pydantic checks it as a part of the settings; the process that reads a model's files does without pydantic.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    path: str
    revision: str | None = None
    pooling: str | None = None
    normalize: bool | None = None
    max_tokens: int | None = None
    template: str | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < SMALLEST_MAX_TOKENS:
            raise ValueError(f"max_tokens must be at least {SMALLEST_MAX_TOKENS}, got {self.max_tokens}")

    @property
    def options(self) -> dict[str, Any]:
        """Return all that is set, by name."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if value is not None}
