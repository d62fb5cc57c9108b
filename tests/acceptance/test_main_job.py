"""The main job whole: every docstring of the standard library over HTTP, compared with sentence-transformers."""

from itertools import islice
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.acceptance.stack import Stack
from tests.reference import packaged_reference
from tests.waiting import wait_for
from vectormill.corpus import read_docstrings
from vectormill.models.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


@pytest.mark.timeout(
    1800
)  # encoded by us and then by the reference: all of them take minutes on two idle cores
# Every 27th is encoded by us and by the reference in seconds, of every length and script; `make test-all` takes each.
@pytest.mark.parametrize("every", [27, pytest.param(1, marks=pytest.mark.slow)])
def test_every_docstring_has_the_vector_that_sentence_transformers_gives_it(
    stack: Stack, collection: str, every: int
) -> None:
    texts = list(islice(read_docstrings(), 0, None, every))
    assert len(texts) > 5000 // every  # some distributions leave parts of the library out
    with stack.client() as client:
        items = [{"key": text.key, "text": text.text} for text in texts]
        job = client.submit(items, model=DEFAULT_MODEL, collection=collection)
        job = client.wait(job["id"], timeout_seconds=1200)
        assert (job["state"], job["num_done"], job["num_failed"]) == ("completed", len(texts), 0)
        exported = {vector["key"]: vector["embedding"] for vector in client.vectors(job["id"])}
    assert list(exported) == [text.key for text in texts]

    by_text = encode_with_little_padding(packaged_reference(), {text.text for text in texts})
    expected = np.array([by_text[text.text] for text in texts])
    found = np.array([exported[text.key] for text in texts])
    cosines = (found * expected).sum(axis=1) / np.linalg.norm(found, axis=1)
    assert cosines.min() >= 0.999, texts[int(cosines.argmin())].key


def encode_with_little_padding(
    reference: "SentenceTransformer", texts: set[str]
) -> dict[str, NDArray[np.float32]]:
    """The reference's own vectors, each text once and beside texts of its length in tokens.

    The library sorts by characters, so that half as many tokens as the texts have are padding; so it is 1 %.
    """
    ordered = sorted(texts)
    lengths = [len(ids) for ids in reference.tokenizer(ordered, truncation=True)["input_ids"]]
    ordered = [text for _, text in sorted(zip(lengths, ordered, strict=True))]
    vectors: dict[str, NDArray[np.float32]] = {}
    for start in range(0, len(ordered), 32):
        batch = ordered[start : start + 32]
        encoded = reference.encode(batch, batch_size=32, normalize_embeddings=True, show_progress_bar=False)
        assert encoded.dtype == np.float32
        vectors.update(zip(batch, encoded, strict=True))
    return vectors


def test_flower_shows_the_device_of_the_worker_and_what_each_chunk_did(stack: Stack) -> None:
    with stack.client() as client:
        job = client.submit([{"key": "a", "text": "Something to encode."}], model=DEFAULT_MODEL)
        client.wait(job["id"], timeout_seconds=240)
    columns = {
        "columns[0][data]": "name",
        "order[0][column]": "0",
        "order[0][dir]": "asc",
        "search[value]": "",
    }
    what = f"job={job['id']} chunk=0 items=1"

    def find_task() -> dict[str, str] | None:
        page = httpx.get(
            f"http://127.0.0.1:{stack.flower_port}/tasks/datatable",
            params={"draw": 1, "start": 0, "length": 10_000, **columns},
        ).json()
        return next((task for task in page["data"] if task["kwargs"] == what and task["result"]), None)

    task = wait_for(find_task, because="Flower shows the task and its result")
    assert task["name"] == "encode.chunk"
    assert task["worker"].startswith(f"{DEFAULT_MODEL}-cpu0@")
    assert "'rows': 1" in task["result"]
    assert "'tokens_per_second': " in task["result"]
    refused = httpx.post(f"http://127.0.0.1:{stack.flower_port}/api/worker/shutdown/{task['worker']}")
    assert refused.status_code in (401, 403, 404)
