"""The scope that a key needs for each request: one table, for the guard and for the OpenAPI description."""

import functools
from dataclasses import dataclass
from re import Pattern
from typing import Final

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.routing import compile_path

from api.openai.operations import OPERATIONS as OTHER_OPERATIONS
from vectormill.keys.api_key import ADMIN, READ
from vectormill.operations import OPERATIONS

METRICS_PATH: Final = "/metrics"
# No scope of a key: the console's own guard decides, by the session of who visits it (api/console/guard.py).
CONSOLE: Final = "console"


class ItemKeyConvertor(PathConvertor):
    """Take the rest of a path with its line breaks, which `path` lacks: it takes the key "a\\n" for "a"."""

    regex = r"[\s\S]*"


register_url_convertor("item_key", ItemKeyConvertor())


@dataclass(frozen=True, slots=True)
class Rule:
    """Requests of these methods to paths of this form need a key of the scope; None: they need none."""

    methods: tuple[str, ...]
    path: str
    scope: str | None

    def fits(self, method: str, path: str) -> bool:
        return method in self.methods and PATTERNS[self.path].fullmatch(path) is not None


SAFE_METHODS: Final = ("GET", "HEAD", "OPTIONS")
CONSOLE_METHODS: Final = (*SAFE_METHODS, "POST")

# The first that fits decides. What none fits needs admin: a route that nobody thought of here is closed.
RULES: Final = (
    Rule(CONSOLE_METHODS, "/console", CONSOLE),
    Rule(CONSOLE_METHODS, "/console/{path:path}", CONSOLE),
    *(
        Rule(SAFE_METHODS if each.method == "GET" else (each.method,), each.path, each.scope)
        for each in (*OPERATIONS, *OTHER_OPERATIONS)
    ),
    # A path has one line: the router takes "/v1/webhooks" and a line break for "/v1/webhooks", which no rule above
    # does.
    Rule(SAFE_METHODS, "/{path:path}", READ),
)
PATTERNS: Final[dict[str, Pattern[str]]] = {rule.path: compile_path(rule.path)[0] for rule in RULES}


# A longer path names an item or nothing; a thousand of them would fill the memory.
MAX_KEPT_CHARS: Final = 256


def find_scope(method: str, path: str) -> str | None:
    """Return the scope that a request needs; None when it needs no key at all."""
    return (_find_scope if len(path) <= MAX_KEPT_CHARS else _find_scope.__wrapped__)(method, path)


# Asked twice a request, of few paths again and again.
@functools.lru_cache(maxsize=1024)
def _find_scope(method: str, path: str) -> str | None:
    return next((rule.scope for rule in RULES if rule.fits(method, path)), ADMIN)
