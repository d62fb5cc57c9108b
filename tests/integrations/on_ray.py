"""Encode texts in a Ray cluster of one node: `python on_ray.py TEXTS ANSWER`."""

import json
import sys
from pathlib import Path

import numpy as np
import ray

from vectormill.integrations.ray import Encoder

if __name__ == "__main__":
    texts = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, _node_ip_address="127.0.0.1")
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    answer = {"version": ray.__version__}
    for batch_format in ("numpy", "pandas", "pyarrow"):
        dataset = ray.data.from_items([{"text": text} for text in texts], override_num_blocks=3).map_batches(
            Encoder,
            compute=ray.data.ActorPoolStrategy(size=1),
            num_cpus=2,
            batch_size=16,
            batch_format=batch_format,
        )
        rows = dataset.take_all()
        vectors = [np.asarray(row["embedding"]) for row in rows]
        answer[batch_format] = {
            "texts": [row["text"] for row in rows],
            "vectors": [None if np.isnan(vector).any() else vector.tolist() for vector in vectors],
            "errors": [row["embedding_error"] or None for row in rows],
        }
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")
