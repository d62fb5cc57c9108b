"""States: a named set of states, used for comparisons in Python and in composed SQL."""


class States(tuple[str, ...]):
    """A tuple of state names that formats as a SQL list: `f"state IN {OPEN}"`."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"({', '.join(map(repr, self))})"
