"""Asks Vectormill through Hugging Face's InferenceClient, which posts to the URL that it is given.

It runs in the environment of that package alone; see test_client_packages.py.
"""

import json
import sys

from huggingface_hub import InferenceClient

asked = json.load(sys.stdin)
url, texts = asked["url"], asked["texts"]

rooted = InferenceClient(base_url=url, api_key="any").feature_extraction(
    texts, normalize=True, truncate=True, truncation_direction="right"
)
named = InferenceClient(base_url=f"{url}/embed", api_key="any").feature_extraction(texts)
similarities = InferenceClient(base_url=f"{url}/similarity", api_key="any").sentence_similarity(
    texts[0], texts
)
print(
    json.dumps(
        {
            "vectors": {"root": rooted.tolist(), "embed": named.tolist()},
            "orders": {"similarity": sorted(range(len(texts)), key=lambda place: -similarities[place])},
        }
    )
)
