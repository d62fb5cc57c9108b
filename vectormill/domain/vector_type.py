"""VectorType: the types of numbers in which vectors are stored and returned, from which all else follows.

A row of VECTOR_TYPES says what a vector is in SQL, in memory and on the wire, how a model's floats become its values,
and how far pgvector indexes it. The columns of JSON, Parquet, `.npy` and other stores follow from the number type of
a row in memory. Code that converts arrays is in vectormill/vectors/vector_types.py. Loads no numpy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

# The numbers by which a model's authors compare its vectors.
COSINE: Final = "cosine"
DOT: Final = "dot"  # the inner product, in which the length of a vector counts

# How the floats of a model become the values of a row.
ROUNDED: Final = "rounded"  # each is rounded to the type
RANGED: Final = (
    "ranged"  # each becomes the code of a step in a range, which is measured once for a vector space
)
SIGNED: Final = "signed"  # each becomes a bit, which says whether it is above 0


@dataclass(frozen=True, slots=True)
class Distance:
    """A distance of pgvector: its operator, its name in operator classes, and the SQL of the score by the distance."""

    operator: str
    name: str
    score: str


BY_PRODUCT: Final = "-distance"
OF_NUMBERS: Final[Mapping[str, Distance]] = {
    COSINE: Distance("<=>", "cosine", "1 - distance"),
    DOT: Distance("<#>", "ip", BY_PRODUCT),
}
# The score is the cosine of the signs, which have no length.
OF_BITS: Final[Mapping[str, Distance]] = {
    COSINE: Distance("<~>", "hamming", "1 - distance * 2 / {dimensions}")
}


@dataclass(frozen=True, slots=True)
class VectorType:
    """One vector type.

    `column` is its SQL type, `row` the numpy dtype of a row, and `wire` the dtype in a column's binary form. `coding`
    is ROUNDED, RANGED or SIGNED. pgvector indexes columns of at most `most_indexed` dimensions, of which none if it is
    0. `norm` is the SQL function of a vector's length, if its values are lengths. `note` explains it to users.
    """

    name: str
    column: str
    row: str
    wire: str
    coding: str = ROUNDED
    most_indexed: int = 0
    norm: str | None = None
    note: str = ""

    @property
    def is_float(self) -> bool:
        """Return True if its values are those of the model, rounded; such a row can mark a missing vector by NaN."""
        return self.coding == ROUNDED

    @property
    def is_half(self) -> bool:
        """Return True if a row has float16, whose largest and smallest numbers a model's floats may exceed."""
        return self.row == "<f2"

    @property
    def has_ranges(self) -> bool:
        """Return True if its values are codes that mean nothing without the ranges of their vector space."""
        return self.coding == RANGED

    @property
    def is_packed(self) -> bool:
        """Return True if a byte of a row holds eight values, each one bit, the first in the highest bit."""
        return self.coding == SIGNED

    @property
    def distances(self) -> Mapping[str, Distance]:
        """Return the distance by which rows are compared for each similarity."""
        return OF_BITS if self.is_packed else OF_NUMBERS

    @property
    def query(self) -> "VectorType":
        """Return the type of the query that rows are compared with: codes are restored to floats first."""
        return DEFAULT_TYPE if self.has_ranges else self

    def width(self, dimensions: int) -> int:
        """Return the number of values in a row."""
        return (dimensions + 7) // 8 if self.is_packed else dimensions

    def header(self, dimensions: int) -> bytes:
        """Return the four bytes that precede the values in a column's binary form."""
        return dimensions.to_bytes(4) if self.is_packed else dimensions.to_bytes(2) + bytes(2)

    def content_bytes(self, dimensions: int) -> int:
        """Return the size in bytes of the values of one vector in its column."""
        return self.width(dimensions) * int(self.wire[-1])

    def column_bytes(self, dimensions: int) -> int:
        """Return the size in bytes of one vector in the binary format of COPY, its header included."""
        return len(self.header(dimensions)) + self.content_bytes(dimensions)


VECTOR_TYPES: Final[Mapping[str, VectorType]] = {
    kind.name: kind
    for kind in (
        VectorType("float32", "vector", "<f4", ">f4", most_indexed=2000, norm="vector_norm"),
        VectorType("float16", "halfvec", "<f2", ">f2", most_indexed=4000, norm="l2_norm"),
        # pgvector has no 8-bit type; a float16 represents every code exactly, and SQL can compute with it.
        VectorType(
            "int8",
            "halfvec",
            "i1",
            ">f2",
            RANGED,
            note="int8 values are codes of ranges that are measured once per vector space",
        ),
        VectorType(
            "binary",
            "bit",
            "u1",
            "u1",
            SIGNED,
            most_indexed=64_000,
            note="binary has one bit per value, with eight bits packed into one number",
        ),
    )
}
# The types of a spec that names none: in a collection, whose rows then stay inline in their pages, and elsewhere.
DEFAULT_IN_COLLECTION: Final = VECTOR_TYPES["float16"]
DEFAULT_TYPE: Final = VECTOR_TYPES["float32"]
FLOAT_TYPES: Final = tuple(name for name, kind in VECTOR_TYPES.items() if kind.is_float)

# These are the same names for type checkers and the command line, generated by `python -m tests.architecture.derived`.
# <vector types>
VectorTypeName = Literal["float32", "float16", "int8", "binary"]
# <end>
