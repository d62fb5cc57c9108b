"""Asks Vectormill through Cohere's own client, both interfaces.

It runs in the environment of that package alone; see test_client_packages.py.
"""

import json
import sys

import cohere

asked = json.load(sys.stdin)
url, model, texts = asked["url"], asked["model"], asked["texts"]

second = cohere.ClientV2(api_key="any", base_url=url)
embedded = second.embed(
    model=model, texts=texts, input_type="search_document", embedding_types=["float"], truncate="END"
)
ranked = second.rerank(model=model, query=texts[0], documents=texts, top_n=3)
first = cohere.Client(api_key="any", base_url=url)
rows = first.embed(model=model, texts=texts, input_type="search_document", truncate="END")
typed = first.embed(model=model, texts=texts, embedding_types=["float"])
first_ranked = first.rerank(model=model, query=texts[0], documents=texts, top_n=3, return_documents=True)
print(
    json.dumps(
        {
            "vectors": {
                "v2": embedded.embeddings.float_,
                "v1": rows.embeddings,
                "v1 typed": typed.embeddings.float_,
            },
            "orders": {
                "v2": [row.index for row in ranked.results],
                "v1": [row.index for row in first_ranked.results],
            },
        }
    )
)
