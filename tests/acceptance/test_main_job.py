"""The main job whole: every docstring of the standard library over HTTP, compared with sentence-transformers."""

import json
import os
import subprocess
import sys

import httpx
import numpy as np
import pytest

from tests.acceptance.stack import Stack
from vectormill.corpus import read_docstrings
from vectormill.registry import DEFAULT_MODEL, find_packaged_model


@pytest.mark.timeout(600)  # 8,700 texts, encoded by us and then by the reference: minutes on two cores
def test_every_docstring_has_the_vector_that_sentence_transformers_gives_it(stack: Stack) -> None:
    from sentence_transformers import SentenceTransformer

    texts = list(read_docstrings())
    assert len(texts) > 5000  # some distributions leave parts of the library out
    with stack.client() as client:
        items = [{"key": text.key, "text": text.text} for text in texts]
        job = client.submit(items, model=DEFAULT_MODEL, collection="docstrings")  # type: ignore[arg-type]
        job = client.wait(job["id"], timeout_seconds=400)
        assert (job["state"], job["num_done"], job["num_failed"]) == ("completed", len(texts), 0)
        assert job["bound_by"]["value"] == "run", job["bound_by"]["reason"]  # the device never waits
        exported = {vector["key"]: vector["embedding"] for vector in client.vectors(job["id"])}
    assert list(exported) == [text.key for text in texts]
    stack.kill_everything()  # the cores are the reference's now

    reference = SentenceTransformer(str(find_packaged_model()), device="cpu", local_files_only=True)
    expected = reference.encode([text.text for text in texts], normalize_embeddings=True)
    found = np.array([exported[text.key] for text in texts])
    cosines = (found * expected).sum(axis=1) / np.linalg.norm(found, axis=1)
    assert cosines.min() >= 0.999, texts[int(cosines.argmin())].key


def test_flower_shows_the_device_of_the_worker_and_what_each_chunk_did(stack: Stack) -> None:
    with stack.client() as client:
        job = client.submit([{"key": "a", "text": "Something to encode."}], model=DEFAULT_MODEL)
        client.wait(job["id"], timeout_seconds=60)
    columns = {
        "columns[0][data]": "name",
        "order[0][column]": "0",
        "order[0][dir]": "asc",
        "search[value]": "",
    }
    page = httpx.get(
        f"http://127.0.0.1:{stack.flower_port}/tasks/datatable",
        params={"draw": 1, "start": 0, "length": 10, **columns},
    ).json()
    (task,) = page["data"]
    assert task["name"] == "encode.chunk"
    assert task["worker"].startswith(f"{DEFAULT_MODEL}-cpu0@")
    assert task["kwargs"] == f"job={job['id']} chunk=0 items=1"
    assert "'rows': 1" in task["result"]
    assert "'tokens_per_second': " in task["result"]
    refused = httpx.post(f"http://127.0.0.1:{stack.flower_port}/api/worker/shutdown/{task['worker']}")
    assert refused.status_code in (401, 403, 404)


@pytest.mark.timeout(300)
def test_encode_starts_a_stack_of_its_own_and_leaves_nothing_running(stack: Stack) -> None:
    """The stack fixture only lends its directory: it is stopped first."""
    stack.stop()
    source = stack.data_dir.parent / "texts.jsonl"
    source.write_text(
        "".join(json.dumps({"key": f"k{n}", "text": f"Text number {n}."}) + "\n" for n in range(20))
    )
    target = stack.data_dir.parent / "vectors.npy"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VECTORMILL_")}
    command = ["encode", str(source), "-o", str(target), "--data-dir", str(stack.data_dir)]
    subprocess.run(
        [sys.executable, "-m", "vectormill.cli", *command], check=True, env=environment, timeout=200
    )
    assert np.load(target).shape == (20, 384)
    assert not (stack.data_dir / "stack.json").exists() or not stack.is_ready()
