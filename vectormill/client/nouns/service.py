"""What the service says of itself."""

from vectormill.client.transport import Json, Transport


class ServiceCalls(Transport):
    """Of models and workers."""

    def models(self) -> list[Json]:
        answer: list[Json] = self.call("GET", "/v1/models")["data"]
        return answer

    def workers(self) -> list[Json]:
        answer: list[Json] = self.call("GET", "/v1/workers")["data"]
        return answer
