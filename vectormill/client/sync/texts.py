# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""Texts that somebody waits for: encoded or judged at once, without a job."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vectormill.client.frames.embeddings import join_embeddings, read_embeddings, split_texts
from vectormill.client.requests import given
from vectormill.client.shapes import EmbeddingsAnswer, RerankAnswer
from vectormill.client.sync.transport import Transport

if TYPE_CHECKING:
    import numpy as np


class TextCalls(Transport):
    """Calls that are answered before anything is stored."""

    def embed(
        self,
        texts: Iterable[str],
        *,
        model: str | None = None,
        input_type: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        long_texts: str | None = None,
    ) -> "np.ndarray[Any, Any]":
        """Return the texts' vectors, float32 [texts, dimensions], in their order; nothing is stored.

        `input_type` is query or document, for models that have a prompt for either; `prompt` is one by name, or text.
        It is the way of searches, 2,048 texts a request: for very many `submit` is cheaper. docs/OPENAI.md.
        """
        options = {
            "model": model,
            "input_type": input_type,
            "prompt": prompt,
            "dimensions": dimensions,
            "normalize": normalize,
            "long_texts": long_texts,
            "encoding_format": "base64",
        }
        parts = []
        for part in split_texts(texts):
            # Not repeated: the server itself waits for a worker, as it does for searches.
            answer = self.call(
                EmbeddingsAnswer,
                "POST",
                "/v1/embeddings",
                json=given({"input": part, **options}),
                timeout=self.long_timeout,
                is_repeatable=False,
            )
            parts.append(read_embeddings(answer))
        return join_embeddings(parts, dimensions)

    def rerank(
        self,
        query: str,
        documents: Sequence[str | Mapping[str, Any]],
        *,
        model: str | None = None,
        top_n: int | None = None,
        return_documents: bool = False,
        max_tokens: int | None = None,
    ) -> RerankAnswer:
        """Return the documents that answer the query best, best first, as `{"index", "relevance_score"}` of
        `results`.
        """
        body = {
            "query": query,
            "documents": list(documents),
            "model": model,
            "top_n": top_n,
            "return_documents": return_documents or None,
            "max_tokens": max_tokens,
        }
        # Not repeated: the server itself waits for a worker, as it does for searches.
        return self.call(
            RerankAnswer,
            "POST",
            "/v1/rerank",
            json=given(body),
            timeout=self.long_timeout,
            is_repeatable=False,
        )
