"""Vectormill: durable bulk embedding jobs.

The code that API, scheduler, worker and command line share; no torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vectormill.client import AsyncClient as AsyncClient
    from vectormill.client import Client as Client

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import the clients on first access, because every process imports this package but few need httpx."""
    if name in ("AsyncClient", "Client"):
        from vectormill import client

        return getattr(client, name)
    raise AttributeError(f"module 'vectormill' has no attribute {name!r}")
