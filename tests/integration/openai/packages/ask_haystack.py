"""Asks Vectormill through Haystack's components for Cohere.

It runs in the environment of these packages alone; see test_client_packages.py.
"""

import json
import sys

from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.embedders.cohere import CohereDocumentEmbedder, CohereTextEmbedder
from haystack_integrations.components.rankers.cohere import CohereRanker

asked = json.load(sys.stdin)
where = {"api_key": Secret.from_token("any"), "api_base_url": asked["url"], "model": asked["model"]}
texts = asked["texts"]

documents = [Document(content=text, meta={"place": place}) for place, text in enumerate(texts)]
embedded = CohereDocumentEmbedder(**where, progress_bar=False).run(documents)["documents"]
queries = [CohereTextEmbedder(**where).run(text)["embedding"] for text in texts]
ranked = CohereRanker(**where).run(query=texts[0], documents=documents)["documents"]
print(
    json.dumps(
        {
            "vectors": {"documents": [each.embedding for each in embedded], "queries": queries},
            "orders": {"ranker": [each.meta["place"] for each in ranked]},
        }
    )
)
