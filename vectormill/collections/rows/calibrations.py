"""Calibrations: the ranges that int8 codes stand for, measured once for a vector space and never again.

A space is named by its spec's fingerprint, so that a text gets the same codes in every job, collection and generation
of the same spec. Knows nothing of what the ranges were measured on.
"""

from sqlalchemy import Connection, text

from vectormill.domain.encoding import EncodingSpec
from vectormill.vectors.quantization import Ranges

FIND_RANGES = text("SELECT ranges FROM vectormill.calibrations WHERE fingerprint = :fingerprint")

# Two workers may have measured at the same time: the first one's ranges are everybody's.
INSERT_RANGES = text("""
    INSERT INTO vectormill.calibrations (fingerprint, ranges) VALUES (:fingerprint, :ranges)
    ON CONFLICT (fingerprint) DO NOTHING
""")


def find_ranges(connection: Connection, spec: EncodingSpec) -> Ranges | None:
    """The ranges of the spec's space, or None while nobody has measured them."""
    content = connection.execute(FIND_RANGES, {"fingerprint": spec.fingerprint()}).scalar_one_or_none()
    return None if content is None else Ranges.from_bytes(content)


def keep_ranges(connection: Connection, spec: EncodingSpec, ranges: Ranges) -> None:
    """Makes these the ranges of the spec's space, unless it has some already."""
    values = {"fingerprint": spec.fingerprint(), "ranges": ranges.to_bytes()}
    connection.execute(INSERT_RANGES, values)
