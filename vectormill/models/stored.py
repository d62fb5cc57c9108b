"""Read the JSON files of a model, in which a stranger wrote what its vectors depend on: each key with its type."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from vectormill.domain.errors import ModelError

T = TypeVar("T", bool, int, float, str, list[Any], dict[str, Any])

# How Git LFS begins the small file that stands for a large one which was not fetched
# (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md).
LFS_POINTER: Final = b"version https://git-lfs"
KINDS: Final = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list", dict: "an object",
}  # fmt: skip
MOST_SHOWN_CHARS: Final = 60


@dataclass(frozen=True)
class Stored:
    """A JSON object in a file of the model named `model`; `place` is the file, and the key for an object within it.

    `taken` collects the values of all keys that were asked for, by place and key, for the file as a whole.
    """

    values: Mapping[str, Any]
    place: str
    model: str
    taken: dict[tuple[str, str], Any] = field(default_factory=dict)

    def take(self, key: str, default: T, *, least: int | None = None) -> T:
        """Return a value of the type of `default`, which is returned where the key is missing or null.

        Raise ModelError for a value of another type, or a number below `least`.
        """
        value = self.find(key)
        if value is None:
            return default
        kind: type = type(default)
        is_fit = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (
            kind is bool
        )
        if not is_fit or (least is not None and value < least):
            bound = "" if least is None else f" from {least}"
            raise self.refuse(key, f"must be {KINDS[kind]}{bound}")
        fit: T = value
        return fit

    def count(self, key: str) -> int:
        """Return a whole number from 1. Raise ModelError if there is none."""
        number = self.take(key, 0, least=1)
        if not number:
            raise ModelError(f"{self.place} of model {self.model!r} has no {key}.")
        return number

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts, or a single one as a list. Raise ModelError for anything else."""
        value = self.find(key)
        listed = [value] if isinstance(value, str) else value or []
        if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
            raise self.refuse(key, "must be a text, or a list of texts")
        return tuple(listed)

    def token(self, key: str) -> str:
        """Return the text of a token, which may be an object with its `content`; empty if there is none."""
        value = self.find(key)
        return str((value.get("content") if isinstance(value, dict) else value) or "")

    def inner(self, key: str) -> "Stored":
        """Return the object below a key, empty if there is none. Raise ModelError for anything else."""
        return Stored(self.take(key, {}), f"{self.place}, {key}", self.model, self.taken)

    def find(self, *keys: str) -> Any:
        """Return the value of the first key that has one, of whatever type; None if none has."""
        for key in keys:
            value = self.values.get(key)
            if value is not None:
                self.taken.setdefault((self.place, key), value)
                return value
        return None

    def refuse(self, key: str, what: str) -> ModelError:
        """Return the error for a value, whose sentence ends with what it must be; `describe` leaves it out."""
        self.taken[self.place, key] = None
        return ModelError(
            f"{self.place} of model {self.model!r} has {key} {shorten(self.values.get(key))}: it {what}."
        )

    def describe(self) -> str:
        """Return a line of the values that were taken of the file, empty if there are none."""
        kept = [(key, value) for (_, key), value in self.taken.items() if not isinstance(value, dict | None)]
        told = (f"{key} {shorten(value)}" for key, value in kept)
        values = ", ".join(told)
        return f"{self.place}: {values}" if values else ""

    def list_rest(self, known: Mapping[str, str]) -> list[str]:
        """Return the keys that nobody took, without empty values and those that are `known` to have no influence."""
        rest = self.values.keys() - known.keys() - {key for place, key in self.taken if place == self.place}
        return sorted(key for key in rest if self.values[key] not in (None, {}, []))


@contextmanager
def naming(place: str, model: str) -> Iterator[None]:
    """Raise ModelError with the file's name for whatever the block finds in it that is not as it should be."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise ModelError(f"{place} of model {model!r} cannot be used: {error!r}.") from error


def shorten(value: Any) -> str:
    """Return the value as JSON, without its end if it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_SHOWN_CHARS else f"{text[: MOST_SHOWN_CHARS - 1]}…"


def read_json(path: Path, model: str, kind: type[T]) -> T:
    """Return the JSON value in a file of a model. Raise ModelError if it is damaged, or of another kind."""
    try:
        content = path.read_bytes()
        if content.startswith(LFS_POINTER):
            raise ModelError(
                f"The file {path} of model {model!r} is a pointer of Git LFS; fetch the file by `git lfs pull`."
            )
        found = json.loads(content.decode("utf-8"))
        json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair cannot be told to others
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"The file {path} of model {model!r} cannot be read: {error}.") from error
    if not isinstance(found, kind):
        raise ModelError(f"The file {path} of model {model!r} must contain {KINDS[kind]} in JSON.")
    return found


def read_stored(path: Path, model: str, place: str = "") -> Stored:
    """Return the JSON object in a file, called `place`; empty if there is no file. Raise ModelError if damaged."""
    return Stored(read_json(path, model, dict) if path.is_file() else {}, place or path.name, model)
