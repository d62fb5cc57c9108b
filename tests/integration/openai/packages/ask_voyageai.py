"""Asks Vectormill through Voyage AI's own client, whose interface of embeddings is nearly that of OpenAI.

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
print(
    json.dumps(
        {
            "vectors": {
                "plain": list(map(list, plain.embeddings)),
                "typed": list(map(list, typed.embeddings)),
            },
            "orders": {},  # its reranking reads `data`, and ours answers `results` as the others do
        }
    )
)
