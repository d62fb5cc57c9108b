"""The service's own models, workers and readiness."""

from vectormill.client.aio.transport import Transport
from vectormill.client.shapes import ModelBody, ModelList, Readiness, WorkerBody, WorkerList


class ServiceCalls(Transport):
    """Calls for models, workers and readiness."""

    async def models(self) -> list[ModelBody]:
        """Return every registered model, and how many workers serve it."""
        return (await self.call(ModelList, "GET", "/v1/models"))["data"]

    async def workers(self) -> list[WorkerBody]:
        """Return every live worker, with what it reports of its devices, its plan and its speed."""
        return (await self.call(WorkerList, "GET", "/v1/workers"))["data"]

    async def readiness(self) -> Readiness:
        """Return which parts of the service are reachable. Raise ApiFailure where it cannot work at all."""
        return await self.call(Readiness, "GET", "/readyz")
