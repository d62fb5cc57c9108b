"""Embeddings over HTTP, as OpenAI's clients ask for them: by a message to a worker, while somebody waits."""

from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from api.bodies.embeddings import EmbeddingsAnswer, read_checked_inputs, write_answer
from api.dependencies import Resources, ResourcesDependency
from api.intake.requests import decode_body
from api.routes.openai.embedded import embed, read_at_once, write
from vectormill.batches.endpoints import EMBEDDINGS_DECODER, EmbeddingsRequest


class EmbeddingsRoute(APIRoute):
    """A route without FastAPI's part: that took longer than all that is done here, as with searches."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return answer_embeddings


async def answer_embeddings(request: Request) -> Response:
    """Answer embeddings, as `post_embeddings` describes."""
    return await post_embeddings(request, request.app.state.resources)


router = APIRouter(tags=["openai"], route_class=EmbeddingsRoute)

EMBEDDINGS_DOCS: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/EmbeddingsRequest"},
                "examples": {
                    "one": {"value": {"input": "how to parse a date"}},
                    "many": {"value": {"input": ["dates", "times"], "encoding_format": "base64"}},
                },
            }
        },
    }
}


@router.post("/v1/embeddings", openapi_extra=EMBEDDINGS_DOCS, response_model=EmbeddingsAnswer)
async def post_embeddings(request: Request, resources: ResourcesDependency) -> Response:
    """The vectors of some texts, in the shapes of OpenAI's API; docs/OPENAI.md says what differs."""
    with resources.gates.json_bytes.hold() as hold:
        wanted, texts = await read_at_once(request, resources, hold, read_request)
        with resources.gates.searches.enter():  # not before: a body may come slowly
            answered, num_tokens = await embed(
                resources, hold, wanted.encoding(), texts, "input", is_list=wanted.has_list
            )
            content = await write(answered, lambda: write_answer(wanted, answered, num_tokens))
            return Response(content, media_type="application/json")


def read_request(body: bytes, resources: Resources) -> tuple[EmbeddingsRequest, list[bytes]]:
    """Raises Problem and InvalidOption."""
    wanted = decode_body(body, EMBEDDINGS_DECODER)
    return wanted, read_checked_inputs(wanted, resources.settings.max_text_chars)
