"""Task: what a job wants of its texts. A row each, from which requests, commands and docs derive."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

# The results that an item can have.
VECTOR: Final = "vector"
SCORE: Final = "score"
RECORD: Final = "record"

# The last part of the path under which a job's results are.
RESULT_ROUTES: Final[Mapping[str, str]] = {
    VECTOR: "vectors",
    SCORE: "results",
    RECORD: "results",
}


@dataclass(frozen=True, slots=True)
class Task:
    """`result` is what comes of an item; `reads_pairs` says that an item is two texts, and not one."""

    name: str
    does: str
    result: str
    reads_pairs: bool = False


EMBED: Final = "embed"
JUDGE: Final = "score"
EXTRACT: Final = "extract"

TASKS: Final[Mapping[str, Task]] = {
    task.name: task
    for task in (
        Task(EMBED, "a vector for each text", VECTOR),
        Task(JUDGE, "how two texts belong together: a probability for each label", SCORE, reads_pairs=True),
        Task(EXTRACT, "what a schema asks for, where it stands in each text", RECORD),
    )
}

# Functions that turn a classifier's numbers into its answer.
SOFTMAX: Final = "softmax"
SIGMOID: Final = "sigmoid"
RAW: Final = "raw"
ACTIVATIONS: Final = (SOFTMAX, SIGMOID, RAW)
# These values for type checkers; a test compares them.
ActivationName = Literal["softmax", "sigmoid", "raw"]


IDS_MARK: Final = b"\xfe"
# The largest value in arrays of ids.
LARGEST_ID: Final = (1 << 31) - 1


def write_token_ids(ids: Sequence[int]) -> bytes:
    """Encode token ids, each from 0 to LARGEST_ID, as a text that is hashed, compared and stored like any other."""
    return IDS_MARK + ",".join(map(str, ids)).encode()


def has_token_ids(text: bytes) -> bool:
    return text.startswith(IDS_MARK)


def read_token_ids(text: bytes) -> list[int]:
    """Read the ids of a text for which `has_token_ids` is true. Raise ValueError where there are none."""
    return [int(number) for number in text.removeprefix(IDS_MARK).split(b",")]
