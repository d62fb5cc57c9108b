# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""The service's own models, workers and readiness."""

from vectormill.client.shapes import ModelBody, ModelList, Readiness, WorkerBody, WorkerList
from vectormill.client.sync.transport import Transport


class ServiceCalls(Transport):
    """Calls for models, workers and readiness."""

    def models(self) -> list[ModelBody]:
        """Return every registered model, and how many workers serve it."""
        return (self.call(ModelList, "GET", "/v1/models"))["data"]

    def workers(self) -> list[WorkerBody]:
        """Return every live worker, with what it reports of its devices, its plan and its speed."""
        return (self.call(WorkerList, "GET", "/v1/workers"))["data"]

    def readiness(self) -> Readiness:
        """Return which parts of the service are reachable. Raise ApiFailure where it cannot work at all."""
        return self.call(Readiness, "GET", "/readyz")
