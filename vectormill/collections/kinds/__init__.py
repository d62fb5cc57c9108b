"""Kinds: what a collection keeps of an item, a vector, a score or records; chosen by the task of its spec."""

from collections.abc import Mapping
from typing import Final

from vectormill.collections.kinds.records import Records
from vectormill.collections.kinds.row_kind import RowKind
from vectormill.collections.kinds.scores import Scores
from vectormill.collections.kinds.vectors import Vectors
from vectormill.domain.encoding import EncodingSpec

ROW_KINDS: Final[Mapping[str, RowKind]] = {kind.result: kind for kind in (Vectors(), Scores(), Records())}


def choose_kind(spec: EncodingSpec) -> RowKind:
    return ROW_KINDS[spec.result]
