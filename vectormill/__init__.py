"""Vectormill: durable bulk embedding jobs.

The code that API, scheduler, worker and command line share; no torch.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vectormill.interface import *  # noqa: F403
else:  # hidden from type checkers, which would take every name for one of ours

    def __getattr__(name: str) -> object:
        """Import what users import from here when they do, since few processes need httpx."""
        if name == "__all__" or not name.startswith("_"):
            offered = vars(importlib.import_module("vectormill.interface"))
            if name == "__all__":
                return sorted(each for each in offered if not each.startswith("_"))
            if name in offered:
                return offered[name]
        raise AttributeError(f"module 'vectormill' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
