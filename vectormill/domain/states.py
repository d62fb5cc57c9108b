"""States: a set of states under one name, which Python compares and SQL is composed of."""


class States(tuple[str, ...]):
    """Names of states, which stand in a statement as a list: `f"state IN {OPEN}"`."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"({', '.join(map(repr, self))})"
