"""Encode texts in a Ray cluster of one node: `python on_ray.py TEXTS ANSWER`."""

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import ray

from vectormill.integrations.ray import Encoder


def try_batches() -> None:
    """Encode batches with null, NaN and a column of that name, and batches without rows, in each format."""
    encoder = Encoder()
    for texts in (["a text", None, float("nan"), "7"], []):
        frame = pd.DataFrame({"text": pd.Series(texts, dtype=object), "embedding": "old"})
        table = pa.table(
            {"text": pa.array([each if isinstance(each, str) else None for each in texts], pa.string())}
        )
        table = table.append_column("embedding", pa.array(["old"] * len(texts), pa.string()))
        arrays = {name: frame[name].to_numpy() for name in frame}
        made = [pa.table(encoder(table)), pa.Table.from_pandas(encoder(frame), preserve_index=False)]
        arrays = encoder(arrays)
        assert arrays["embedding"].shape == (len(texts), 384), arrays["embedding"].shape
        assert [bool(each) for each in arrays["embedding_error"]] == [False, True, True, False][: len(texts)]
        for each in made:
            assert each.column_names == ["text", "embedding", "embedding_error"], each.column_names
            kind = each.schema.field("embedding").type
            assert kind.value_type == pa.float32(), kind
            assert each.schema.field("embedding_error").type in (pa.string(), pa.large_string()), each.schema
            assert list(map(bool, each["embedding_error"].to_pylist())) == list(
                map(bool, arrays["embedding_error"])
            )
        assert [each is None for each in made[0]["embedding"].to_pylist()] == [False, True, True, False][
            : len(texts)
        ]


if __name__ == "__main__":
    try_batches()
    texts = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, _node_ip_address="127.0.0.1")
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    answer = {"version": ray.__version__}
    for batch_format in ("numpy", "pandas", "pyarrow"):
        dataset = ray.data.from_items(
            [{"text": text, "embedding": "old"} for text in texts], override_num_blocks=3
        ).map_batches(
            Encoder,
            compute=ray.data.ActorPoolStrategy(size=1),
            num_cpus=2,
            batch_size=16,
            batch_format=batch_format,
        )
        rows = dataset.take_all()
        vectors = [np.asarray(np.nan if row["embedding"] is None else row["embedding"]) for row in rows]
        answer[batch_format] = {
            "texts": [row["text"] for row in rows],
            "vectors": [None if np.isnan(vector).any() else vector.tolist() for vector in vectors],
            "errors": [row["embedding_error"] or None for row in rows],
        }
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")
