"""The operations of the API, and the scope that each request needs, for both the key guard and the OpenAPI document.

Routes without an Operation describe themselves (decision 0050).
"""

import functools
from dataclasses import dataclass
from re import Pattern
from typing import Any, Final

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.routing import compile_path

from api.openai import operations as other_operations
from vectormill.batches import operations as batches
from vectormill.collections import operations as collections
from vectormill.jobs import operations as jobs
from vectormill.keys.api_key import ADMIN, READ
from vectormill.models import operations as models
from vectormill.operation import Operation
from vectormill.runs import operations as runs
from vectormill.schedules import operations as schedules
from vectormill.search import operations as search
from vectormill.sources import operations as sources
from vectormill.webhooks import operations as webhooks
from vectormill.workers import operations as workers

FEATURES: Final = (
    batches, collections, jobs, models, runs, schedules, search, sources, webhooks, workers, other_operations,
)  # fmt: skip
OPERATIONS: Final[tuple[Operation[Any], ...]] = tuple(
    value for feature in FEATURES for value in vars(feature).values() if isinstance(value, Operation)
)

METRICS_PATH: Final = "/metrics"
# Not a scope of keys: the console's own guard checks the visitor's session (api/console/guard.py).
CONSOLE: Final = "console"


class ItemKeyConvertor(PathConvertor):
    """Match the rest of a path including line breaks.

    Starlette's `path` stops at them, and so takes the key "a\\n" for "a".
    """

    regex = r"[\s\S]*"


register_url_convertor("item_key", ItemKeyConvertor())


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for requests with one of these methods and a path of this form.

    They need a key of scope `scope`, or no key if that is None.
    """

    methods: tuple[str, ...]
    path: str
    scope: str | None

    def fits(self, method: str, path: str) -> bool:
        return method in self.methods and PATTERNS[self.path].fullmatch(path) is not None


SAFE_METHODS: Final = ("GET", "HEAD", "OPTIONS")
CONSOLE_METHODS: Final = (*SAFE_METHODS, "POST")

# The first matching rule decides. If none matches, admin is needed, so a forgotten route is closed.
RULES: Final = (
    Rule(CONSOLE_METHODS, "/console", CONSOLE),
    Rule(CONSOLE_METHODS, "/console/{path:path}", CONSOLE),
    *(
        Rule(SAFE_METHODS if each.method == "GET" else (each.method,), each.path, each.scope)
        for each in OPERATIONS
    ),
    # Nothing is there, other than an item: whoever may read is told so, whatever the method.
    Rule((*SAFE_METHODS, "POST", "PUT", "PATCH", "DELETE"), "/{path:path}/", READ),
    # This matches no line break. The router takes "/v1/webhooks" with a line break for "/v1/webhooks", but no
    # rule above does; such a path needs admin.
    Rule(SAFE_METHODS, "/{path:path}", READ),
)
PATTERNS: Final[dict[str, Pattern[str]]] = {rule.path: compile_path(rule.path)[0] for rule in RULES}


# Longer paths are not cached: they name items or nothing, and a thousand of them would take much memory.
MAX_KEPT_CHARS: Final = 256


def find_scope(method: str, path: str) -> str | None:
    """Return the scope that a request needs; None if it needs no key."""
    return (_find_scope if len(path) <= MAX_KEPT_CHARS else _find_scope.__wrapped__)(method, path)


# Cached, since it is called twice per request, for the same few paths.
@functools.lru_cache(maxsize=1024)
def _find_scope(method: str, path: str) -> str | None:
    return next((rule.scope for rule in RULES if rule.fits(method, path)), ADMIN)
