"""Vectormill: durable bulk embedding jobs.

The code that API, scheduler, worker and command line share; no torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vectormill.client import AsyncClient as AsyncClient
    from vectormill.client import Client as Client
    from vectormill.objects.manifest import read_manifest as read_manifest
    from vectormill.objects.reading import read_batches as read_batches
    from vectormill.objects.reading import read_table as read_table

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import what this package offers on first access, since few processes need httpx or pyarrow."""
    if name in ("read_batches", "read_manifest", "read_table"):
        from vectormill.objects import reading

        return getattr(reading, name)
    if name in ("AsyncClient", "Client"):
        from vectormill import client

        return getattr(client, name)
    raise AttributeError(f"module 'vectormill' has no attribute {name!r}")
