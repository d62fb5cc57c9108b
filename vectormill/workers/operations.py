"""API operations on workers, and on the health of a service."""

from dataclasses import replace
from typing import Final

from vectormill.keys.api_key import READ
from vectormill.operation import Operation
from vectormill.workers.bodies import Liveness, Readiness, Root, WorkerList

LIST: Final = Operation("GET", "/v1/workers", READ, WorkerList)
# A browser is led from here to the console.
SHOW_ROOT: Final = Operation("GET", "/", None, Root)
SHOW_LIVENESS: Final = Operation("GET", "/livez", None, Liveness)
SHOW_READINESS: Final = Operation("GET", "/readyz", None, Readiness, other_status=503)
# This route exists for clients of text-embeddings-inference, which has it.
SHOW_HEALTH: Final = replace(SHOW_READINESS, path="/health")
SHOW_METRICS: Final = Operation("GET", "/metrics", READ, bytes, media_types=("text/plain",))
