"""The operations of all features; routes without an Operation describe themselves (decision 0050)."""

from typing import Any, Final

from vectormill.batches.operations import OPERATIONS as BATCH_OPERATIONS
from vectormill.collections.operations import OPERATIONS as COLLECTION_OPERATIONS
from vectormill.jobs.operations import OPERATIONS as JOB_OPERATIONS
from vectormill.models.operations import OPERATIONS as MODEL_OPERATIONS
from vectormill.operation import Operation
from vectormill.quotes.operations import OPERATIONS as QUOTE_OPERATIONS
from vectormill.runs.operations import OPERATIONS as RUN_OPERATIONS
from vectormill.schedules.operations import OPERATIONS as SCHEDULE_OPERATIONS
from vectormill.search.operations import OPERATIONS as SEARCH_OPERATIONS
from vectormill.sources.operations import OPERATIONS as SOURCE_OPERATIONS
from vectormill.webhooks.operations import OPERATIONS as WEBHOOK_OPERATIONS
from vectormill.workers.operations import OPERATIONS as WORKER_OPERATIONS

OPERATIONS: Final[tuple[Operation[Any], ...]] = (
    *BATCH_OPERATIONS,
    *COLLECTION_OPERATIONS,
    *JOB_OPERATIONS,
    *MODEL_OPERATIONS,
    *QUOTE_OPERATIONS,
    *RUN_OPERATIONS,
    *SCHEDULE_OPERATIONS,
    *SEARCH_OPERATIONS,
    *SOURCE_OPERATIONS,
    *WEBHOOK_OPERATIONS,
    *WORKER_OPERATIONS,
)
