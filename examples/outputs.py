"""Compute dense, sparse and multi-vector outputs of texts in one pass, and search with all of them together.

    vectormill models add BAAI/bge-m3
    vectormill up --model bge-m3              # in another terminal
    python examples/outputs.py bge-m3

The same by commands: `vectormill submit FILE --collection NAME --model bge-m3 --outputs dense,sparse,multi_vector`.
"""

import sys

from vectormill import Client
from vectormill.corpus import read_docstrings, take_evenly

COLLECTION = "docstrings_outputs"
OUTPUTS = ("dense", "sparse", "multi_vector")
NUM_TEXTS = 100
QUERIES = ("how to parse a date", "compress data without loss", "run a function in another process")

texts = {each.key: each.text for each in take_evenly(list(read_docstrings()), NUM_TEXTS)}
items = [{"key": key, "text": text} for key, text in texts.items()]
with Client() as client:
    job = client.submit(
        items, collection=COLLECTION, model=sys.argv[1], outputs=",".join(OUTPUTS), progress=True
    )
    first = next(iter(client.results(job["id"])))
    print(
        f"{first['key']}: {len(first['embedding'])} dimensions, {len(first['sparse'])} weights of words, "
        f"{len(first['multi_vector'])} vectors of tokens"
    )
    for query in QUERIES:
        print(f"\nNearest to: {query}")
        for match in client.search(COLLECTION, query, outputs=OUTPUTS, limit=5):
            print(f"{match['score']:.3f}", match["key"], "-", texts[match["key"]].strip().partition("\n")[0])
