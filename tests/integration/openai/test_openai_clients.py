"""Clients that people already have, unchanged but for base_url and key, and a real worker: the vectors are those of
sentence-transformers.
"""

import asyncio
import base64
import json
import warnings
from collections.abc import Iterator, Sequence
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer as RustTokenizer

from tests.api_server import JSON
from tests.commands import run
from tests.front_door import FrontDoor, open_front_door
from tests.models import packaged_model
from tests.reference import PROMPTED, known_vectors
from tests.reference import TEXTS as KNOWN_TEXTS
from vectormill.batches.endpoints import MAX_INPUTS
from vectormill.cli import searches
from vectormill.client import AsyncClient, Client
from vectormill.models.registry import DEFAULT_MODEL

TEXTS = list(KNOWN_TEXTS[: len(PROMPTED)])
KEY = "any key, where none is wanted"
OWN_IDS = {"token_ids": True}


@pytest.fixture(scope="module")
def door(postgres_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoor]:
    with open_front_door(postgres_url, redis_url, tmp_path_factory.mktemp("cache")) as door:
        yield door


@pytest.fixture(scope="module")
def client(door: FrontDoor) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected() -> NDArray[np.float32]:
    """[texts, 384], of length 1."""
    return known_vectors(TEXTS)


def assert_same(found: Sequence[Sequence[float]], expected: NDArray[np.float32]) -> None:
    vectors = np.array(found, dtype=np.float32)
    assert vectors.shape == expected.shape
    assert (vectors * expected).sum(axis=1).min() > 0.9999


def ids_of(text: str, *, special: bool = True) -> list[int]:
    tokenizer = RustTokenizer.from_file(str(packaged_model() / "tokenizer.json"))
    tokenizer.no_padding()
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    return ids


def test_the_official_client_gets_the_vectors_of_the_reference(
    client: openai.OpenAI, expected: NDArray[np.float32]
) -> None:
    answer = client.embeddings.create(model=DEFAULT_MODEL, input=TEXTS, user="u-1")
    assert [each.index for each in answer.data] == list(range(len(TEXTS)))
    assert_same([each.embedding for each in answer.data], expected)
    assert (answer.object, answer.data[0].object, answer.model) == ("list", "embedding", DEFAULT_MODEL)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(ids_of(text)) for text in TEXTS)
    assert answer._request_id


def test_numbers_and_base64_are_the_same_float32(door: FrontDoor) -> None:
    plain, encoded = (
        door.http.post("/v1/embeddings", json={"input": TEXTS, "encoding_format": form}).json()["data"]
        for form in ("float", "base64")
    )
    for numbers, text in zip(plain, encoded, strict=True):
        assert np.array(numbers["embedding"], np.float32).tobytes() == base64.b64decode(text["embedding"])


def test_bytes_are_the_same_numbers_without_json(door: FrontDoor, client: openai.OpenAI) -> None:
    encoded = client.embeddings.create(model=DEFAULT_MODEL, input=TEXTS)
    expected = np.array([each.embedding for each in encoded.data], np.float32)
    for name in ("float32", "float16"):
        body = {"input": TEXTS, "encoding_format": "bytes", "embed_dtype": name, "endianness": "little"}
        answer = door.http.post("/v1/embeddings", json=body)
        assert answer.headers["content-type"] == "application/octet-stream"
        metadata = json.loads(answer.headers["metadata"])
        (block,) = metadata["data"]
        found = np.frombuffer(answer.content, name).reshape(block["shape"])
        np.testing.assert_array_equal(found, expected.astype(name))
        assert (metadata["model"], metadata["usage"]["prompt_tokens"]) == (
            DEFAULT_MODEL,
            encoded.usage.prompt_tokens,
        )
        with Client(door.url) as ours:
            np.testing.assert_array_equal(ours.embed(TEXTS, embed_dtype=name), found)
    refused = door.http.post("/v1/embeddings", json={"input": TEXTS, "embed_dtype": "float16"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


def test_our_own_clients_embed_and_rerank_as_they_do(door: FrontDoor, expected: NDArray[np.float32]) -> None:
    async def ask() -> tuple[NDArray[np.float32], list[int]]:
        async with AsyncClient(door.url) as client:
            ranked = await client.rerank(TEXTS[0], TEXTS)
            return await client.embed(TEXTS), [row["index"] for row in ranked["results"]]

    with Client(door.url) as client:
        found = client.embed(TEXTS)
        shorter = client.embed(TEXTS, model=DEFAULT_MODEL, input_type="document", dimensions=64)
        best = [row["index"] for row in client.rerank(TEXTS[0], TEXTS, top_n=2)["results"]]
    assert_same(found.tolist(), expected)
    assert shorter.shape == (len(TEXTS), 64)
    again, ranking = asyncio.run(ask())
    assert_same(again.tolist(), expected)
    assert ranking == np.argsort(-(expected @ expected[0])).tolist()
    assert best == ranking[:2]


@pytest.mark.parametrize("form", ["lines", "stdin", "jsonl"])
def test_the_command_ranks_any_number_of_texts_as_one_request_does(
    form: str,
    door: FrontDoor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = [text.strip() for text in TEXTS if text.strip() and "\n" not in text]
    monkeypatch.setattr(searches, "RANKED_AT_ONCE", 2)
    written = "\n\n".join(texts)
    path = tmp_path / ("texts.jsonl" if form == "jsonl" else "texts")
    path.write_text(
        "".join(
            json.dumps({"key": str(2 * number + 1), "body": text}) + "\n" for number, text in enumerate(texts)
        )
        if form == "jsonl"
        else written
    )
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(written.encode()), "latin-1"))
    options = ("--text-field", "body") if form == "jsonl" else ()
    named = "-" if form == "stdin" else str(path)
    assert run("rerank", texts[0], named, *options, "--limit", "3", "--json", "--api-url", door.url) == 0
    shown = capsys.readouterr()
    with Client(door.url) as client:
        ranked = client.rerank(texts[0], texts, top_n=3)["results"]
    found = [json.loads(line) for line in shown.out.splitlines()]
    assert [each["text"] for each in found] == [texts[each["index"]] for each in ranked]
    assert [each["key"] for each in found] == [str(2 * each["index"] + 1) for each in ranked], (
        "blank lines count"
    )
    assert [each["score"] for each in found] == pytest.approx(
        [each["relevance_score"] for each in ranked], abs=1e-5
    )
    path.write_text("")
    if form == "lines":
        assert run("rerank", "a query", str(path), "--api-url", door.url) == 2
        assert "has no texts to rank" in capsys.readouterr().err
        assert run("rerank", texts[0], str(tmp_path / "none.txt"), "--api-url", door.url) == 2


def test_token_ids_are_read_as_they_are(client: openai.OpenAI, expected: NDArray[np.float32]) -> None:
    """Whether or not the special tokens are among them; a text's own tokens, not those of what they are decoded to."""
    bare = [ids_of(text, special=False) for text in TEXTS]
    for given in (bare, [ids_of(text) for text in TEXTS]):
        answer = client.embeddings.create(model=DEFAULT_MODEL, input=given, extra_body=OWN_IDS)
        assert_same([each.embedding for each in answer.data], expected)
        assert answer.usage.prompt_tokens == sum(len(ids_of(text)) for text in TEXTS)
    one = client.embeddings.create(model=DEFAULT_MODEL, input=bare[0], extra_body=OWN_IDS)
    assert_same([one.data[0].embedding], expected[:1])
    split = bare[4][3:]  # no text has these: it begins in the middle of a word of another
    twice = client.embeddings.create(model=DEFAULT_MODEL, input=[split + split], extra_body=OWN_IDS)
    assert twice.usage.prompt_tokens == 2 * len(split) + 2


def test_ids_of_another_vocabulary_are_refused_and_those_that_nobody_says_are_the_model_s_own(
    client: openai.OpenAI,
) -> None:
    """LangChain sends those of tiktoken unless it is told otherwise, and small ones exist in every vocabulary."""
    for ids, said in (([101, 40_000], "40000"), ([-1], "-1"), ([2**40], "30521")):
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            client.embeddings.create(model=DEFAULT_MODEL, input=[[2054], ids], extra_body=OWN_IDS)
        assert (refused.value.param, refused.value.code) == ("input[1]", "invalid_item")
    unnamed: tuple[Any, ...] = ([2054, 2003], [[2054], [2003]])
    for ids in unnamed:
        with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
            client.embeddings.create(model=DEFAULT_MODEL, input=ids)


def test_fewer_dimensions_and_prompts_are_those_of_a_job(
    door: FrontDoor, client: openai.OpenAI, expected: NDArray[np.float32]
) -> None:
    answer = client.embeddings.create(model=DEFAULT_MODEL, input=TEXTS, dimensions=64)
    shorter = expected[:, :64] / np.linalg.norm(expected[:, :64], axis=1, keepdims=True)
    assert_same([each.embedding for each in answer.data], shorter)
    prompted = client.embeddings.create(model=DEFAULT_MODEL, input=TEXTS, extra_body={"prompt": "query: "})
    assert_same([each.embedding for each in prompted.data], known_vectors(PROMPTED))
    for both in ({"prompt": "x", "input_type": "query"}, {"prompt": "a\0b"}):
        assert door.http.post("/v1/embeddings", json={"input": "a", **both}).status_code == 400


def test_a_long_input_is_cut_and_told_of(client: openai.OpenAI) -> None:
    (mill,) = ids_of("mill", special=False)
    as_text, as_ids = (
        client.embeddings.create(model=DEFAULT_MODEL, input=given, extra_body=OWN_IDS)
        for given in (["mill " * 1000, "mill"], [[mill] * 1000, [mill]])
    )
    for answer in (as_text, as_ids):
        assert answer.usage.prompt_tokens == 256 + 3
        assert answer.usage.model_extra == {"truncated_inputs": 1}
    assert_same([as_ids.data[0].embedding], np.array([as_text.data[0].embedding]))
    with pytest.raises(openai.BadRequestError, match="1002 tokens") as refused:
        client.embeddings.create(
            model=DEFAULT_MODEL, input=["a", "mill " * 1000], extra_body={"long_texts": "fail"}
        )
    assert refused.value.param == "input[1]"


def test_as_many_inputs_as_openai_takes_are_answered_and_no_more(client: openai.OpenAI) -> None:
    texts = [f"number {number % 50}" for number in range(MAX_INPUTS)]
    answer = client.embeddings.create(model=DEFAULT_MODEL, input=texts, dimensions=8)
    found = np.array([each.embedding for each in answer.data])
    assert np.allclose(found[:50], found[2000 - 50 : 2000], atol=1e-6)
    assert not np.allclose(found[0], found[1], atol=1e-3)
    with pytest.raises(openai.BadRequestError, match="2,049"):
        client.embeddings.create(model=DEFAULT_MODEL, input=[*texts, "one more"])


def test_refusals_raise_what_the_official_client_knows(door: FrontDoor, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="Unknown model 'gpt-9'") as unknown:
        client.embeddings.create(model="gpt-9", input="a")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert unknown.value.request_id
    refused: tuple[Any, ...] = ("", " ", [], ["a", ""], [[]], ["a\0"])
    for given in refused:
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model=DEFAULT_MODEL, input=given)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model=DEFAULT_MODEL, input="a", dimensions=385)
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model=DEFAULT_MODEL, input="a", extra_body={"dimension": 3})
    mixed = door.http.post("/v1/embeddings", json={"input": ["a", 1]})
    assert (mixed.status_code, mixed.json()["error"]["type"]) == (400, "invalid_request_error")
    half = door.http.post("/v1/embeddings", content=b'{"input": ["a", "\\ud800"]}', headers=JSON)
    assert (half.status_code, half.json()["error"]["param"]) == (400, "input[1]")


def test_models_are_listed_and_found_for_their_clients_and_ours(
    door: FrontDoor, client: openai.OpenAI
) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == (DEFAULT_MODEL, "model", "vectormill")
    assert model.created > 1_600_000_000
    assert client.models.retrieve(DEFAULT_MODEL) == model
    with Client(door.url) as ours:
        assert ours.models()[0] == door.http.get(f"/v1/models/{DEFAULT_MODEL}").json()
    with pytest.raises(openai.NotFoundError, match="Registered models") as unknown:
        client.models.retrieve("owner/nothing")
    assert unknown.value.code == "model_not_found"


def test_langchain_s_embeddings_work_unchanged(door: FrontDoor, expected: NDArray[np.float32]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from langchain_openai import OpenAIEmbeddings

    options: dict[str, Any] = {"base_url": f"{door.url}/v1", "api_key": KEY}
    embeddings = OpenAIEmbeddings(model=DEFAULT_MODEL, check_embedding_ctx_length=False, **options)

    async def ask() -> list[list[float]]:
        async with embeddings.async_client._client:  # it closes none of its clients itself
            return await embeddings.aembed_documents(TEXTS)

    with embeddings.client._client:
        assert_same(embeddings.embed_documents(TEXTS), expected)
        assert_same([embeddings.embed_query(TEXTS[0])], expected[:1])
    assert_same(asyncio.run(ask()), expected)


def test_llama_index_s_embeddings_work_unchanged(door: FrontDoor, expected: NDArray[np.float32]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from llama_index.embeddings.openai import OpenAIEmbedding  # type: ignore[import-untyped]

        embeddings = OpenAIEmbedding(
            model_name=DEFAULT_MODEL, api_base=f"{door.url}/v1", api_key=KEY, embed_batch_size=3
        )

        async def ask() -> list[list[float]]:
            async with embeddings._get_aclient():  # nor does this
                vectors: list[list[float]] = await embeddings.aget_text_embedding_batch(TEXTS)
                return vectors

        with embeddings._get_client():
            assert_same(embeddings.get_text_embedding_batch(TEXTS), expected)
            assert_same([embeddings.get_query_embedding(TEXTS[0])], expected[:1])
        assert_same(asyncio.run(ask()), expected)


# ---- text-embeddings-inference and Cohere


def test_embed_answers_as_text_embeddings_inference(door: FrontDoor, expected: NDArray[np.float32]) -> None:
    assert_same(door.http.post("/embed", json={"inputs": TEXTS}).json(), expected)
    assert_same(door.http.post("/embed", json={"inputs": TEXTS[0], "truncate": True}).json(), expected[:1])
    long = door.http.post("/embed", json={"inputs": ["a", "mill " * 1000]})
    assert (long.status_code, long.json()["error_type"]) == (400, "Validation")
    assert "inputs[1]" in long.json()["error"]
    prompt = door.http.post("/embed", json={"inputs": "a", "prompt_name": "nothing"})
    assert "no prompt 'nothing'" in prompt.json()["error"]
    info = door.http.get("/info").json()
    assert (info["model_id"], info["max_input_length"]) == (DEFAULT_MODEL, 256)


def test_similarity_and_the_root_answer_as_text_embeddings_inference(
    door: FrontDoor, expected: NDArray[np.float32]
) -> None:
    """The root is what Hugging Face's InferenceClient asks when it is given a base URL."""
    right = {"inputs": TEXTS, "truncation_direction": "Right"}
    assert_same(door.http.post("/", json=right).json(), expected)
    body = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}, "parameters": {"truncate": True}}
    assert door.http.post("/similarity", json=body).json() == pytest.approx(
        (expected[1:] @ expected[0]).tolist(), abs=1e-4
    )
    nothing = door.http.post("/similarity", json={"inputs": {"source_sentence": "a", "sentences": []}})
    assert (nothing.status_code, nothing.json()["error_type"]) == (400, "Validation")
    ready, health = (door.http.get(path).json() for path in ("/readyz", "/health"))
    assert health == ready


def test_a_wish_to_cut_the_start_of_a_text_is_refused_in_a_sentence(door: FrontDoor) -> None:
    rank = {"query": "a", "texts": ["b"], "truncation_direction": "left"}
    for path, body, member in (
        ("/embed", {"inputs": "a", "truncation_direction": "Left"}, "error"),
        ("/rerank", rank, "error"),
        ("/v2/embed", {"texts": ["a"], "truncate": "START"}, "message"),
        ("/v1/embed", {"texts": ["a"], "truncate": "START"}, "message"),
    ):
        refused = door.http.post(path, json=body)
        assert (refused.status_code, "at the end" in refused.json()[member]) == (400, True), path


def test_rerank_takes_the_texts_by_either_name_and_not_by_both(door: FrontDoor) -> None:
    body = {"query": TEXTS[0], "return_text": True, "top_n": 2}
    by_texts = door.http.post("/rerank", json=body | {"texts": TEXTS}).json()
    documents = [TEXTS[0], *({"text": text} for text in TEXTS[1:])]
    assert door.http.post("/rerank", json=body | {"documents": documents}).json() == by_texts
    assert len(by_texts) == 2
    assert door.http.post("/rerank", json=body | {"documents": TEXTS, "texts": TEXTS}).status_code == 400
    assert "texts must have 1" in door.http.post("/rerank", json=body).json()["error"]


def test_voyage_s_names_mean_what_ours_do(door: FrontDoor) -> None:
    ours = door.http.post("/v1/embeddings", json={"input": TEXTS, "dimensions": 64}).json()
    voyage = {"input": TEXTS, "output_dimension": 64, "output_dtype": "float", "truncation": True}
    assert door.http.post("/v1/embeddings", json=voyage).json()["data"] == ours["data"]
    long = door.http.post("/v1/embeddings", json={"input": "mill " * 1000, "truncation": False})
    assert (long.status_code, "1002 tokens" in long.json()["error"]["message"]) == (400, True)
    for twice in (voyage | {"dimensions": 64}, voyage | {"long_texts": "fail"}):
        assert "are aliases" in door.http.post("/v1/embeddings", json=twice).json()["error"]["message"]


def test_a_ranking_that_is_asked_for_by_voyage_s_names_is_answered_in_its_shape(door: FrontDoor) -> None:
    body = {"query": TEXTS[0], "documents": TEXTS, "return_documents": True}
    ours, again = (door.http.post("/v1/rerank", json=body | {"top_n": 2}).json() for _ in range(2))
    assert ours["id"] != again["id"]
    num_tokens = ours["usage"]["total_tokens"]
    assert num_tokens == ours["usage"]["prompt_tokens"] >= sum(len(ids_of(text)) for text in TEXTS)
    voyage = door.http.post("/v1/rerank", json=body | {"top_k": 2, "truncation": True}).json()
    assert voyage["data"] == [row | {"document": row["document"]["text"]} for row in ours["results"]]
    assert (voyage["object"], voyage["usage"], "results" in voyage) == ("list", ours["usage"], False)
    long = body | {"documents": ["mill " * 1000], "truncation": False}
    assert door.http.post("/v1/rerank", json=long).status_code == 422
    assert "are aliases" in door.http.post("/v1/rerank", json=body | {"top_n": 2, "top_k": 2}).text


def test_rerank_answers_as_its_clients_know(door: FrontDoor, expected: NDArray[np.float32]) -> None:
    body = {"query": TEXTS[0], "texts": TEXTS, "return_text": True}
    ranked = door.http.post("/rerank", json=body).json()
    best = np.argsort(-(expected @ expected[0])).tolist()
    assert [row["index"] for row in ranked] == best
    assert ranked[0] == {"index": 0, "score": pytest.approx(1.0, abs=1e-5), "text": TEXTS[0]}
    cohere = {"query": TEXTS[0], "documents": TEXTS, "top_n": 2}
    plain = door.http.post("/v2/rerank", json=cohere).json()
    assert [row["index"] for row in plain["results"]] == best[:2]
    sent_by_litellm = {**cohere, "return_documents": True, "max_chunks_per_doc": None, "rank_fields": None}
    answer = door.http.post("/v2/rerank", json=sent_by_litellm).json()
    assert answer["results"][0]["document"] == {"text": TEXTS[best[0]]}
    assert answer["id"] != plain["id"]
    assert answer["meta"]["billed_units"] == {"search_units": 1}
    sent_to_vllm = {**cohere, "model": DEFAULT_MODEL, "return_documents": True, "rank_fields": ["text"]}
    answer = door.http.post("/rerank", json=sent_to_vllm).json()
    assert answer == door.http.post("/v1/rerank", json=sent_to_vllm).json() | {"id": answer["id"]}
    assert [row["document"] for row in answer["results"]] == [{"text": TEXTS[place]} for place in best[:2]]
    assert answer["usage"]["total_tokens"] > 0
    bare = door.http.post("/rerank", json={**sent_to_vllm, "return_documents": False}).json()["results"]
    assert [(row["index"], row["document"]) for row in bare] == [(place, None) for place in best[:2]]
    twice = door.http.post("/rerank", json={**sent_to_vllm, "raw_scores": True})
    assert (twice.status_code, "return_documents" in twice.json()["error"]) == (400, True)
    raw = door.http.post("/rerank", json={**body, "raw_scores": True})
    assert (raw.status_code, "activation" in raw.json()["error"]) == (400, True)


def test_rerank_truncates_long_texts_only_where_it_is_asked_to(door: FrontDoor) -> None:
    body = {"query": TEXTS[0], "texts": [TEXTS[1], "mill " * 1000]}
    for refusing in ({}, {"truncate": False}, {"truncate": None}):
        answer = door.http.post("/rerank", json=body | refusing)
        assert (answer.status_code, "texts[1]" in answer.json()["error"]) == (400, True)
    assert len(door.http.post("/rerank", json=body | {"truncate": True}).json()) == 2
    to_vllm = body | {"return_documents": False}
    assert len(door.http.post("/rerank", json=to_vllm | {"truncate": True}).json()["results"]) == 2
    refused = door.http.post("/rerank", json=to_vllm | {"truncate": False})
    assert (refused.status_code, "omit truncate" in refused.json()["error"]) == (400, True)


def test_a_cap_of_tokens_beyond_what_the_model_reads_caps_nothing(door: FrontDoor) -> None:
    """Haystack's CohereRanker always sends 4,096."""
    body = {"query": TEXTS[0], "documents": ["mill " * 400, TEXTS[1]]}
    uncapped, capped = (
        door.http.post("/v2/rerank", json=body | cap).json()["results"]
        for cap in ({}, {"max_tokens_per_doc": 4096})
    )
    assert capped == uncapped
    assert door.http.post("/v2/rerank", json=body | {"max_tokens_per_doc": 8}).json()["results"] != uncapped


def test_embed_answers_as_cohere(door: FrontDoor, expected: NDArray[np.float32]) -> None:
    types = ["float", "base64", "binary", "ubinary"]
    body = {"texts": TEXTS, "input_type": "search_query", "embedding_types": types, "output_dimension": 64}
    answer = door.http.post("/v2/embed", json=body).json()
    found = answer["embeddings"]
    assert_same(found["float"], expected[:, :64] / np.linalg.norm(expected[:, :64], axis=1, keepdims=True))
    floats = np.array(found["float"], np.float32)
    assert [base64.b64decode(text) for text in found["base64"]] == [row.tobytes() for row in floats]
    bits = np.packbits(floats > 0, axis=1)
    assert found["ubinary"] == bits.tolist()
    assert found["binary"] == (bits.astype(int) - 128).tolist()
    assert answer["meta"]["billed_units"]["input_tokens"] == sum(len(ids_of(text)) for text in TEXTS)
    first = door.http.post("/v1/embed", json={**body, "embedding_types": None}).json()
    assert (first["embeddings"], first["response_type"]) == (found["float"], "embeddings_floats")
    assert door.http.post("/v1/embed", json=body).json()["embeddings"] == found
    unknown = door.http.post("/v2/embed", json={"texts": ["a"], "model": "embed-v4.0"})
    assert (unknown.status_code, "Unknown model" in unknown.json()["message"]) == (404, True)
