"""The table of all kinds of results."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from vectormill.domain.encoding import EncodingSpec
from vectormill.results.kind import ResultKind, Results
from vectormill.results.records import Records
from vectormill.results.representations import ManyRepresentations
from vectormill.results.scores import Scores
from vectormill.results.vectors import Vectors

RESULT_KINDS: Final[Mapping[str, ResultKind]] = {
    kind.result: kind for kind in (Vectors(), Scores(), Records(), ManyRepresentations())
}


def choose_kind(spec: EncodingSpec) -> ResultKind:
    """Return the kind of the results of a spec."""
    return RESULT_KINDS[spec.result]


def describe_first(results: Results, spec: EncodingSpec) -> dict[str, Any]:
    """Return the first row's results as fields of a JSON object, as a line of NDJSON has them."""
    (parts,) = choose_kind(spec).write(results[:1], spec)
    described: dict[str, Any] = msgspec.json.decode(b"{" + b"".join(parts)[1:] + b"}")
    return described
