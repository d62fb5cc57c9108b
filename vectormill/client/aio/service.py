"""What the service says of itself."""

from vectormill.client.aio.transport import Transport
from vectormill.client.shapes import ModelBody, ModelList, Readiness, WorkerBody, WorkerList


class ServiceCalls(Transport):
    """Of models and workers."""

    async def models(self) -> list[ModelBody]:
        """Every registered model, and how many workers serve it."""
        return (await self.call(ModelList, "GET", "/v1/models"))["data"]

    async def workers(self) -> list[WorkerBody]:
        """Every live worker, with what it reports of its devices, its plan and its speed."""
        return (await self.call(WorkerList, "GET", "/v1/workers"))["data"]

    async def readiness(self) -> Readiness:
        """What the service stands on, and what of it is there. Raises ApiFailure where it cannot work at all."""
        return await self.call(Readiness, "GET", "/readyz")
