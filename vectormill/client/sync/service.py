# Made of the same file in `aio` by `python -m tests.architecture.derived`: change that one.
"""What the service says of itself."""

from vectormill.client.shapes import ModelBody, ModelList, Readiness, WorkerBody, WorkerList
from vectormill.client.sync.transport import Transport


class ServiceCalls(Transport):
    """Of models and workers."""

    def models(self) -> list[ModelBody]:
        """Every registered model, and how many workers serve it."""
        return (self.call(ModelList, "GET", "/v1/models"))["data"]

    def workers(self) -> list[WorkerBody]:
        """Every live worker, with what it reports of its devices, its plan and its speed."""
        return (self.call(WorkerList, "GET", "/v1/workers"))["data"]

    def readiness(self) -> Readiness:
        """What the service stands on, and what of it is there. Raises ApiFailure where it cannot work at all."""
        return self.call(Readiness, "GET", "/readyz")
