"""Extract persons, places, dates and organizations from sentences.

    vectormill models add ./gliner_small-v2.1     # docs/RECORDS.md says how this folder is made
    vectormill up --model gliner_small-v2.1       # in another terminal
    python examples/records.py gliner_small-v2.1

For texts in a file, `vectormill extract texts.jsonl --schema schema.json --model NAME` does all.
"""

import json
import sys
from collections import Counter

from vectormill import Client

SCHEMA = dict.fromkeys(("person", "place", "date", "organization"))
SENTENCES = (
    "Marie Curie was born in Warsaw in 1867 and won the Nobel Prize in Physics in 1903.",
    "Larry Page and Sergey Brin founded Google in California in 1998.",
    "Jane Austen, who wrote Emma, was born in Steventon in 1775.",
    "The Summer Olympics of 2008 were opened in Beijing on 8 August.",
    "Alan Turing was born in London in 1912 and studied at the University of Cambridge.",
    "Johannes Gutenberg printed books in Mainz around 1450.",
)

items = [{"key": str(number), "text": text} for number, text in enumerate(SENTENCES, 1)]
types: Counter[str] = Counter()
with Client() as client:
    job = client.submit(
        items, task="extract", model=sys.argv[1], extract_schema=json.dumps(SCHEMA), progress=True
    )
    for item, row in zip(items, client.records(job["id"]), strict=True):
        print(item["text"])
        # A record is a path of steps, here of one: a nested schema, for RexUniNLU, has longer ones.
        for record in row["output"]:
            print("   ", " / ".join(f"{step['type']}: {step['span']}" for step in record))
            types[record[-1]["type"]] += 1
print("records:", ", ".join(f"{count} {name}" for name, count in types.most_common()))
