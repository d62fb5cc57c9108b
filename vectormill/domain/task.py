"""Task: the result that a job asks for. Requests, commands and docs derive from this table of tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

# The kinds of result that an item can have.
VECTOR: Final = "vector"
SCORE: Final = "score"
RECORD: Final = "record"
REPRESENTATIONS: Final = "representation"  # one or several outputs of an encoding, as `outputs` asks

# The results whose size differs from item to item; the others are rows of equally many numbers.
VARYING: Final = frozenset({RECORD, REPRESENTATIONS})

# The last part of the path of a job's results.
RESULT_ROUTES: Final[Mapping[str, str]] = {
    VECTOR: "vectors",
    SCORE: "results",
    RECORD: "results",
    REPRESENTATIONS: "results",
}

# The outputs of an encoding, which a job may ask for together. One forward pass computes all of them.
DENSE: Final = "dense"  # one vector for a text
SPARSE: Final = "sparse"  # a weight for each word of the vocabulary, most of them 0
MULTI_VECTOR: Final = "multi_vector"  # a vector for each token
OUTPUTS: Final = (DENSE, SPARSE, MULTI_VECTOR)


@dataclass(frozen=True, slots=True)
class Task:
    """A task that a job can ask for, such as `embed`.

    `result` is the kind of result that an item gets; `reads_pairs` says that an item is a pair of texts.
    """

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
        Task(JUDGE, "how two texts relate: a probability for each label", SCORE, reads_pairs=True),
        Task(EXTRACT, "what a schema asks for, with its position in each text", RECORD),
    )
}

# The functions that turn a classifier's outputs into scores.
SOFTMAX: Final = "softmax"
SIGMOID: Final = "sigmoid"
TANH: Final = "tanh"
RAW: Final = "raw"
ACTIVATIONS: Final = (SOFTMAX, SIGMOID, TANH, RAW)
# The same values for type checkers; a test compares them.
ActivationName = Literal["softmax", "sigmoid", "tanh", "raw"]


IDS_MARK: Final = b"\xfe"
# The largest value in arrays of ids.
LARGEST_ID: Final = (1 << 31) - 1


def write_token_ids(ids: Sequence[int]) -> bytes:
    """Encode token ids, each from 0 to LARGEST_ID, as a text.

    The text is hashed, compared and stored like any other.
    """
    return IDS_MARK + ",".join(map(str, ids)).encode()


def has_token_ids(text: bytes) -> bool:
    return text.startswith(IDS_MARK)


def read_token_ids(text: bytes) -> list[int]:
    """Decode the token ids of a text for which `has_token_ids` is true.

    Raise ValueError for any other text.
    """
    return [int(number) for number in text.removeprefix(IDS_MARK).split(b",")]
