"""The operations of all features; routes without an Operation describe themselves (decision 0050)."""

from typing import Any, Final

from vectormill.batches import operations as batches
from vectormill.collections import operations as collections
from vectormill.jobs import operations as jobs
from vectormill.models import operations as models
from vectormill.operation import Operation
from vectormill.runs import operations as runs
from vectormill.schedules import operations as schedules
from vectormill.search import operations as search
from vectormill.sources import operations as sources
from vectormill.webhooks import operations as webhooks
from vectormill.workers import operations as workers

FEATURES: Final = (
    batches, collections, jobs, models, runs, schedules, search, sources, webhooks, workers,
)  # fmt: skip

OPERATIONS: Final[tuple[Operation[Any], ...]] = tuple(
    value for feature in FEATURES for value in vars(feature).values() if isinstance(value, Operation)
)
