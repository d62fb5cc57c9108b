"""Visitor: who looks at the console, and what he may do. Asks nobody."""

from dataclasses import dataclass

from fastapi import Request

from vectormill.keys.api_key import WRITE, includes


@dataclass(frozen=True, slots=True)
class Visitor:
    """`key_name` is None where no key exists and none is needed: then all may be done, as over HTTP."""

    key_name: str | None
    scope: str
    csrf_token: str

    @property
    def can_write(self) -> bool:
        return includes(self.scope, WRITE)


def find_visitor(request: Request) -> Visitor:
    """Return the visitor whom the guard has let in."""
    visitor: Visitor = request.state.visitor
    return visitor
