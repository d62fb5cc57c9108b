"""HeldBatch: a claimed request batch, and what is needed to bring it on. Knows neither lines nor answers."""

from dataclasses import dataclass

from vectormill.domain.requests.request_batch import RequestBatch
from vectormill.models.registry import Registry
from vectormill.settings import Settings
from vectormill.work.loop import Held


@dataclass(slots=True, kw_only=True)
class HeldBatch(Held):
    """A batch as it was claimed."""

    batch: RequestBatch
    settings: Settings
    registry: Registry
