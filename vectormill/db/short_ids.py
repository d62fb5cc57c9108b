"""Find a record by the beginning of its id, which people type and the console shows in place of all of it."""

import re
from typing import Final
from uuid import UUID

from sqlalchemy import Engine, TextClause

from vectormill.domain.errors import NotFound

# Ids are random: of a million records, a given record shares eight digits with another one in 4,300 cases.
LEAST_DIGITS: Final = 8
DIGITS: Final = re.compile(r"[0-9a-f]+")
MOST_NAMED: Final = 5


def find_by_prefix(engine: Engine, statement: TextClause, prefix: str, missing: type[NotFound]) -> UUID:
    """Return the only id that begins with these digits, of those that the statement lists `BETWEEN :least AND :most`.

    Raise `missing` if there is none, if there are several, which the message names, or if the digits are too few.
    """
    digits = prefix.lower().replace("-", "")
    if not DIGITS.fullmatch(digits) or len(digits) >= 32:
        raise missing
    if len(digits) < LEAST_DIGITS:
        raise missing(f"{missing()} Of an id, at least the first {LEAST_DIGITS} digits are needed.")
    ends = {"least": UUID(digits.ljust(32, "0")), "most": UUID(digits.ljust(32, "f")), "limit": MOST_NAMED}
    with engine.connect() as connection:
        found = list(connection.execute(statement, ends).scalars())
    if len(found) > 1:
        raise missing(f"Several ids begin with {prefix}: {', '.join(map(str, found))}. Write more digits.")
    if not found:
        raise missing
    id: UUID = found[0]
    return id
