"""Asks Vectormill through the client of another API: `python ask_package.py NAME`, with what to ask on standard input.

It runs in the environment of that package alone; see test_client_packages.py.
"""

import json
import sys
from typing import Any

Found = dict[str, dict[str, Any]]


def ask_cohere(url: str, model: str, texts: list[str]) -> Found:
    """Ask by Cohere's own client, both interfaces."""
    import cohere

    second, first = (make(api_key="any", base_url=url) for make in (cohere.ClientV2, cohere.Client))
    embedded = second.embed(
        model=model, texts=texts, input_type="search_document", embedding_types=["float"], truncate="END"
    )
    ranked = second.rerank(model=model, query=texts[0], documents=texts, top_n=3)
    rows = first.embed(model=model, texts=texts, input_type="search_document", truncate="END")
    typed = first.embed(model=model, texts=texts, embedding_types=["float"])
    first_ranked = first.rerank(model=model, query=texts[0], documents=texts, top_n=3, return_documents=True)
    return {
        "vectors": {
            "v2": embedded.embeddings.float_, "v1": rows.embeddings, "v1 typed": typed.embeddings.float_,
        },
        "orders": {
            "v2": [row.index for row in ranked.results], "v1": [row.index for row in first_ranked.results],
        },
    }  # fmt: skip


def ask_haystack(url: str, model: str, texts: list[str]) -> Found:
    """Ask by Haystack's components for Cohere."""
    from haystack import Document
    from haystack.utils import Secret
    from haystack_integrations.components.embedders.cohere import CohereDocumentEmbedder, CohereTextEmbedder
    from haystack_integrations.components.rankers.cohere import CohereRanker

    where = {"api_key": Secret.from_token("any"), "api_base_url": url, "model": model}
    documents = [Document(content=text, meta={"place": place}) for place, text in enumerate(texts)]
    embedded = CohereDocumentEmbedder(**where, progress_bar=False).run(documents)["documents"]
    queries = [CohereTextEmbedder(**where).run(text)["embedding"] for text in texts]
    ranked = CohereRanker(**where).run(query=texts[0], documents=documents)["documents"]
    return {
        "vectors": {"documents": [each.embedding for each in embedded], "queries": queries},
        "orders": {"ranker": [each.meta["place"] for each in ranked]},
    }


def ask_huggingface(url: str, model: str, texts: list[str]) -> Found:
    """Ask by Hugging Face's InferenceClient, which posts to the URL that it is given."""
    from huggingface_hub import InferenceClient

    def at(path: str) -> Any:
        return InferenceClient(base_url=f"{url}{path}", api_key="any")

    rooted = at("").feature_extraction(texts, normalize=True, truncate=True, truncation_direction="right")
    named = at("/embed").feature_extraction(texts)
    similarities = at("/similarity").sentence_similarity(texts[0], texts)
    return {
        "vectors": {"root": rooted.tolist(), "embed": named.tolist()},
        "orders": {"similarity": sorted(range(len(texts)), key=lambda place: -similarities[place])},
    }


def ask_litellm(url: str, model: str, texts: list[str]) -> Found:
    """Ask for embeddings as of OpenAI and Cohere, and for rankings as of these, TEI and vLLM."""
    import litellm

    embedded = litellm.embedding(model=f"openai/{model}", input=texts, api_base=f"{url}/v1", api_key="any")
    by_cohere = litellm.embedding(
        model=f"cohere/{model}", input=texts, api_base=f"{url}/v2/embed", api_key="any"
    )
    asked = {"query": texts[0], "documents": texts, "api_base": url, "api_key": "any"}
    ranked = litellm.rerank(model=f"cohere/{model}", max_tokens_per_doc=4096, **asked)
    by_tei = litellm.rerank(model=f"huggingface/{model}", top_n=3, **asked)
    by_vllm = litellm.rerank(model=f"hosted_vllm/{model}", **asked)
    assert [row["document"]["text"] for row in by_vllm.results] == [
        texts[row["index"]] for row in by_vllm.results
    ]
    return {
        "vectors": {
            "openai": [row["embedding"] for row in embedded.data],
            "cohere": [row["embedding"] for row in by_cohere.data],
        },
        "orders": {
            "cohere": [row["index"] for row in ranked.results],
            "huggingface": [row["index"] for row in by_tei.results],
            "hosted_vllm": [row["index"] for row in by_vllm.results],
        },
    }


def ask_voyageai(url: str, model: str, texts: list[str]) -> Found:
    """Ask by Voyage AI's own client, whose interface is nearly that of OpenAI and Jina."""
    import voyageai

    # voyageai makes no request at all unless max_retries is at least one.
    client = voyageai.Client(api_key="any", base_url=f"{url}/v1", max_retries=1)
    plain = client.embed(texts, model=model)
    typed = client.embed(texts, model=model, input_type="document", truncation=True, output_dtype="float")
    ranked = client.rerank(texts[0], texts, model=model, top_k=3)
    every = client.rerank(texts[0], texts, model=model)
    return {
        "vectors": {"plain": list(map(list, plain.embeddings)), "typed": list(map(list, typed.embeddings))},
        "orders": {
            "three": [row.index for row in ranked.results], "all": [row.index for row in every.results],
        },
    }  # fmt: skip


if __name__ == "__main__":
    asking = {
        "cohere": ask_cohere,
        "haystack": ask_haystack,
        "huggingface": ask_huggingface,
        "litellm": ask_litellm,
        "voyageai": ask_voyageai,
    }
    print(json.dumps(asking[sys.argv[1]](**json.load(sys.stdin))))
