"""Asks Vectormill through litellm: embeddings as of OpenAI, and rankings as of Cohere and of text-embeddings-inference.

It runs in the environment of that package alone; see test_client_packages.py.
"""

import json
import sys

import litellm

asked = json.load(sys.stdin)
url, model, texts = asked["url"], asked["model"], asked["texts"]

embedded = litellm.embedding(model=f"openai/{model}", input=texts, api_base=f"{url}/v1", api_key="any")
by_cohere = litellm.embedding(model=f"cohere/{model}", input=texts, api_base=f"{url}/v2/embed", api_key="any")
ranked = litellm.rerank(
    model=f"cohere/{model}",
    query=texts[0],
    documents=texts,
    api_base=url,
    api_key="any",
    max_tokens_per_doc=4096,
)
by_tei = litellm.rerank(
    model=f"huggingface/{model}", query=texts[0], documents=texts, api_base=url, api_key="any", top_n=3
)
print(
    json.dumps(
        {
            "vectors": {
                "openai": [row["embedding"] for row in embedded.data],
                "cohere": [row["embedding"] for row in by_cohere.data],
            },
            "orders": {
                "cohere": [row["index"] for row in ranked.results],
                "huggingface": [row["index"] for row in by_tei.results],
            },
        }
    )
)
