"""Task: the result that a job asks for. Requests, commands and docs derive from this table of tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

# The kinds of result that an item can have.
VECTOR: Final = "vector"
SCORE: Final = "score"
RECORD: Final = "record"
REPRESENTATIONS: Final = "representation"  # one or several outputs of an encoding, as `outputs` asks

# The kinds of collection by what their rows are.
VECTORS: Final = "vectors"
SCORES: Final = "scores"
RECORDS: Final = "records"


@dataclass(frozen=True, slots=True)
class Result:
    """A kind of result, as clients know it. Its columns and formats are in vectormill/results.

    `route` is the last part of the path of a job's results, `kept_as` the kind of the collections that keep them, and
    `part` their name in the parameter `include` of an export. Those that vary are of another size for each item; the
    others are rows of equally many numbers.
    """

    name: str
    route: str
    kept_as: str
    part: str
    is_varying: bool = False


# All generations of a collection have the same kind; those of a collection of vectors may differ in their outputs.
RESULTS: Final[Mapping[str, Result]] = {
    result.name: result
    for result in (
        Result(VECTOR, "vectors", VECTORS, "vector"),
        Result(SCORE, "results", SCORES, "score"),
        Result(RECORD, "results", RECORDS, "output", is_varying=True),
        Result(REPRESENTATIONS, "results", VECTORS, "vector", is_varying=True),
    )
}
VARYING: Final = frozenset(name for name, result in RESULTS.items() if result.is_varying)

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
