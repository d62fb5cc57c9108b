# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""Calls that answer at once: searches, and texts encoded or reranked without a job."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from vectormill.batches.endpoints import RerankAnswer
from vectormill.batches.operations import EMBED, RERANK
from vectormill.client.answers import Matches, join_embeddings, read_embeddings, split_texts
from vectormill.client.requests import given
from vectormill.client.sync.transport import Transport
from vectormill.search.operations import SEARCH, ManySearchesAnswer

if TYPE_CHECKING:
    import numpy as np


class SearchCalls(Transport):
    """Calls that search a collection, or encode or rerank texts without storing anything."""

    def search(
        self,
        collection: str,
        text: str | None = None,
        *,
        embedding: Iterable[float] | None = None,
        sparse: Mapping[int, float] | None = None,
        multi_vector: Iterable[Iterable[float]] | None = None,
        more_like: str | None = None,
        limit: int = 10,
        offset: int | None = None,
        filter: Mapping[str, Any] | None = None,
        mode: str | None = None,
        weights: Mapping[str, float] | None = None,
        outputs: Sequence[str] | None = None,
        include: Sequence[str] | None = None,
        group_by: str | None = None,
        min_score: float | None = None,
        ef_search: int | None = None,
        fingerprint: str | None = None,
    ) -> Matches:
        """Return the best matches for a text, for vectors of the same space, or for a row.

        Instead of a text a query may have vectors of its own for the outputs that are to be compared: `embedding`,
        `sparse`, weights by their places in the vocabulary from 0, and `multi_vector`, a vector for each token.
        `more_like` is the key of a row to find similar rows for. `filter` is a condition on the metadata, such as
        `{"lang": "de", "year": {"gte": 2020}}`. `mode` is vector, text (words) or hybrid; `weights` are the
        weights of the rankings that are fused, as `{"vector": 1, "text": 0.5}`. `outputs` are those of the collection
        that are compared, of dense, sparse and multi_vector. `include` lists the parts
        returned besides key and score: vector, text, metadata; by default the metadata. `group_by="document"`
        returns only the best passage of each document. See docs/SEARCH.md.
        """
        query = {
            "text": text,
            "embedding": [float(number) for number in embedding] if embedding is not None else None,
            "sparse": {int(place): float(weight) for place, weight in sparse.items()}
            if sparse is not None
            else None,
            "multi_vector": [[float(number) for number in vector] for vector in multi_vector]
            if multi_vector is not None
            else None,
            "more_like": more_like,
            "limit": limit,
            "offset": offset,
            "filter": dict(filter) if filter is not None else None,
            "mode": mode,
            "weights": dict(weights) if weights is not None else None,
            "outputs": outputs,
            "include": list(include) if include is not None else None,
            "group_by": group_by,
            "min_score": min_score,
            "ef_search": ef_search,
            "fingerprint": fingerprint,
        }
        return Matches.from_answer(self.ask(SEARCH, collection, body=query))

    def search_many(
        self, collection: str, queries: Iterable[str | Mapping[str, Any]], **options: Any
    ) -> list[Matches]:
        """Search for many queries at once and return their matches, a list for each query, in order.

        The texts of all queries are encoded together. A query is a text, or an object with arguments of
        `search`. `options` apply to every query that does not set its own: `client.search_many("docs",
        ["dates", {"more_like": "a", "limit": 3}], filter={"lang": "de"})`.
        """
        asked = [{"text": query} if isinstance(query, str) else dict(query) for query in queries]
        if not asked:
            return []
        body = {"queries": [given({**options, **query}) for query in asked]}
        answer = self.ask(SEARCH, collection, body=body)
        return [Matches.from_answer(one) for one in cast(ManySearchesAnswer, answer)["data"]]

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
        embed_dtype: Literal["float32", "float16"] = "float32",
    ) -> "np.ndarray[Any, Any]":
        """Return the texts' vectors [texts, dimensions] as numbers of `embed_dtype`, in the order of the texts.

        Nothing is stored. float16 halves what is sent.

        `input_type` is query or document, for models that have a prompt for each; `prompt` is a prompt's name
        or text. Texts are encoded like search queries, 2,048 a request: for very many texts `submit` is
        cheaper. See docs/OPENAI.md.
        """
        options = {
            "model": model,
            "input_type": input_type,
            "prompt": prompt,
            "dimensions": dimensions,
            "normalize": normalize,
            "long_texts": long_texts,
            "encoding_format": "base64",
            "embed_dtype": None if embed_dtype == "float32" else embed_dtype,
        }
        parts = []
        for part in split_texts(texts):
            answer = self.ask(EMBED, body={"input": part, **options})
            parts.append(read_embeddings(answer, embed_dtype))
        return join_embeddings(parts, dimensions, embed_dtype)

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
        """Return the documents that answer the query best, best first.

        The list `results` of the answer has `{"index", "relevance_score"}` of each document.
        """
        body = {
            "query": query,
            "documents": list(documents),
            "model": model,
            "top_n": top_n,
            "return_documents": return_documents or None,
            "max_tokens": max_tokens,
        }
        return self.ask(RERANK, body=body)
