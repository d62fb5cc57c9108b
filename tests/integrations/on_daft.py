"""Encode texts with Daft on this machine: `python on_daft.py TEXTS ANSWER`."""

import json
import sys
from pathlib import Path

import daft
from daft import col

from vectormill.integrations.daft import embed

if __name__ == "__main__":
    texts = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    frame = daft.from_pydict({"text": texts})
    told = frame.select(col("text"), embed(col("text"), errors=True, batch_size=16).alias("made")).to_pydict()
    plain = frame.with_column("embedding", embed(col("text"))).to_pydict()
    halves = frame.select(embed(col("text"), vector_type="float16").alias("embedding")).to_pydict()

    def listed(vectors: list) -> list:  # type: ignore[type-arg]
        return [None if vector is None else vector.tolist() for vector in vectors]

    none = daft.from_pydict({"text": texts, "embedding": texts}).where(col("text") == "no such text")
    empty = none.with_column("embedding", embed(col("text"))).to_arrow()
    assert (empty.num_rows, empty.column_names) == (0, ["text", "embedding"]), empty.schema

    reasons = [made["error"] for made in told["made"]]
    answer = {
        "version": daft.__version__,
        "with errors": {
            "texts": told["text"],
            "vectors": listed([made["embedding"] for made in told["made"]]),
            "errors": reasons,
        },
        "plain": {"texts": plain["text"], "vectors": listed(plain["embedding"]), "errors": reasons},
        "float16": {"texts": texts, "vectors": listed(halves["embedding"]), "errors": reasons},
    }
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")
