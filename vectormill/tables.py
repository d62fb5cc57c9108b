"""The static tables of all features, in the schema `vectormill`.

Tables of results are created at run time: see vectormill/collections/generation_tables.py.

States are TEXT with a CHECK, never ENUM, because adding a state must not need a lock.
"""

from vectormill.batches import table as batches
from vectormill.collections import table as collections
from vectormill.db.schema import SCHEMA, metadata
from vectormill.jobs import table as jobs
from vectormill.keys import table as keys
from vectormill.objects import table as objects
from vectormill.runs import table as runs
from vectormill.schedules import table as schedules
from vectormill.sources import table as sources
from vectormill.webhooks import table as webhooks
from vectormill.workers import table as processes

__all__ = [
    "SCHEMA",
    "batches",
    "collections",
    "jobs",
    "keys",
    "metadata",
    "objects",
    "processes",
    "runs",
    "schedules",
    "sources",
    "webhooks",
]
