"""Asks Vectormill through Voyage AI's own client, whose interface is nearly that of OpenAI and Jina.

It runs in the environment of that package alone; see test_client_packages.py.
"""

import json
import sys

import voyageai

asked = json.load(sys.stdin)
model, texts = asked["model"], asked["texts"]

# voyageai makes no request at all unless max_retries is at least one.
client = voyageai.Client(api_key="any", base_url=f"{asked['url']}/v1", max_retries=1)
plain = client.embed(texts, model=model)
typed = client.embed(texts, model=model, input_type="document", truncation=True, output_dtype="float")
ranked = client.rerank(texts[0], texts, model=model, top_k=3)
every = client.rerank(texts[0], texts, model=model)
print(
    json.dumps(
        {
            "vectors": {
                "plain": list(map(list, plain.embeddings)),
                "typed": list(map(list, typed.embeddings)),
            },
            "orders": {
                "three": [row.index for row in ranked.results],
                "all": [row.index for row in every.results],
            },
        }
    )
)
