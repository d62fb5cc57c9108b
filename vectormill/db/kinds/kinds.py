"""Which kind of rows a generation has: that of its spec's task."""

from collections.abc import Mapping
from typing import Final

from vectormill.db.kinds.records import Records
from vectormill.db.kinds.row_kind import RowKind
from vectormill.db.kinds.scores import Scores
from vectormill.db.kinds.vectors import Vectors
from vectormill.domain.encoding import EncodingSpec

ROW_KINDS: Final[Mapping[str, RowKind]] = {kind.result: kind for kind in (Vectors(), Scores(), Records())}


def choose_kind(spec: EncodingSpec) -> RowKind:
    return ROW_KINDS[spec.result]
