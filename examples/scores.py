"""Score pairs of texts, and see how well the scores tell them apart.

    vectormill up                                    # in another terminal
    python examples/scores.py                        # cosines of the packaged all-MiniLM-L6-v2
    python examples/scores.py ms-marco-MiniLM-L6-v2  # after `vectormill models add cross-encoder/ms-marco-MiniLM-L6-v2`

The first paragraph of a docstring is paired with its own rest, and with the rest of another docstring. A model that is
not the packaged one needs `vectormill up --model NAME`. For pairs in a file, `vectormill score pairs.jsonl` does all.
"""

import statistics
import sys

from vectormill import Client
from vectormill.corpus import read_docstrings, take_evenly

NUM_DOCSTRINGS = 100

parts = [each.text.strip().partition("\n\n") for each in read_docstrings()]
parts = take_evenly([part for part in parts if part[2]], NUM_DOCSTRINGS)
pairs = []
for number, (first, _, rest) in enumerate(parts):
    other = parts[number - len(parts) // 2][2]
    pairs.append({"key": f"{number}/own", "text": first, "text_pair": rest})
    pairs.append({"key": f"{number}/other", "text": first, "text_pair": other})

model = sys.argv[1] if len(sys.argv) > 1 else None
with Client() as client:
    job = client.submit(pairs, task="score", model=model, progress=True)
    scores = {row["key"]: row["score"] for row in client.scores(job["id"])}

for kind in ("own", "other"):
    median = statistics.median(scores[f"{number}/{kind}"] for number in range(len(parts)))
    print(f"{len(parts)} docstrings with {kind} rest: median score {median:.3f}")
higher = sum(scores[f"{number}/own"] > scores[f"{number}/other"] for number in range(len(parts)))
print(f"own rest scored higher: {higher / len(parts):.1%}")
