"""codes: what residual codes of multi-vectors save, and how they rank rows, compared with halves and dense vectors.

Each document is a docstring without its first sentence, which is its query. The multi-vectors are MiniLM's last hidden
states, normalized: it was not trained for them, but random weights would rank nothing.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Harness
from benchmarks.models import find_packaged
from benchmarks.tables import NUMBER, Report, Table, write_number
from benchmarks.texts import list_docstrings, split_first_sentence
from vectormill.corpus import take_evenly
from vectormill.domain.vector_type import VECTOR_TYPES
from vectormill.vectors.representations import send_vectors
from vectormill.vectors.residual_codes import measure_codebook, restore

NUM_DOCUMENTS: Final = 2000
NUM_QUERIES: Final = 400
MAX_TOKENS: Final = 256
MAX_QUERY_TOKENS: Final = 32
BATCH: Final = 64
SAMPLED_TOKENS: Final = 40_000
LEAST_WORDS, LEAST_QUERY_WORDS = 10, 4
BEST: Final = 10
LENGTH_BYTES: Final = 4  # of a value in a row of Postgres

States = list[npt.NDArray[np.float16]]


def run(harness: Harness) -> Report:
    pairs = list_pairs(harness.items or NUM_DOCUMENTS)
    places = take_evenly(range(len(pairs)), NUM_QUERIES)
    harness.say(f"encoding {len(pairs):,} documents and {len(places)} queries")
    documents, dense = encode([text for _, text in pairs], MAX_TOKENS)
    queries, dense_queries = encode([pairs[place][0] for place in places], MAX_QUERY_TOKENS)
    tokens = np.concatenate(documents)
    sample = np.random.default_rng(0).permutation(len(tokens))[:SAMPLED_TOKENS]
    harness.say("measuring the codebook")
    codebook = measure_codebook(tokens[sample].astype(np.float32))
    codes = codebook.encode(documents)
    restored = [restore(each, codebook) for each in codes]
    harness.say("ranking")
    width = tokens.shape[1]
    num_bytes = {
        "dense (float16)": len(documents) * VECTOR_TYPES["float16"].column_bytes(width),
        "halves": sum(len(send_vectors(each, 0)) for each in documents),
        "residual codes": sum(map(len, codes)),
    }
    scores = {
        "dense (float16)": dense_queries @ dense.T,
        "halves": measure_all(queries, documents),
        "residual codes": measure_all(queries, restored),
    }
    rows = tuple(
        (
            name,
            NUMBER(num_bytes[name] / len(documents) + LENGTH_BYTES),
            "" if name.startswith("dense") else NUMBER(num_bytes[name] / len(tokens)),
            f"{measure_ndcg(scores[name], places):.3f}",
        )
        for name in num_bytes
    )
    cosines = np.einsum("nd,nd->n", np.concatenate(restored), tokens.astype(np.float32))
    return Report(
        f"{len(documents):,} docstrings, {len(tokens):,} tokens, {len(places)} queries.",
        (Table(("all-MiniLM-L6-v2, 384 dimensions", "bytes a document", "bytes a token", "nDCG@10"), rows),),
        (
            f"{len(codebook.centroids)} centroids. The cosine of a restored vector with its own is "
            f"{write_number(float(cosines.mean()))} on average and {write_number(float(cosines.min()))} at least.",
        ),
    )


def list_pairs(most: int) -> list[tuple[str, str]]:
    """Return first sentences, all different, with what follows each in its docstring."""
    split = (split_first_sentence(item["text"]) for item in list_docstrings())
    found = {
        sentence: rest
        for sentence, rest in split
        if len(sentence.split()) >= LEAST_QUERY_WORDS and len(rest.split()) >= LEAST_WORDS
    }
    return take_evenly(list(found.items()), most)


def encode(texts: Sequence[str], max_tokens: int) -> tuple[States, npt.NDArray[np.float32]]:
    """Return MiniLM's last hidden states of each text, float16 [tokens, 384], and its dense vectors; all normalized."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    path = find_packaged().path
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path).eval()
    states: dict[int, npt.NDArray[np.float16]] = {}
    dense = np.empty((len(texts), model.config.hidden_size), np.float32)
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    for start in range(0, len(order), BATCH):
        places = order[start : start + BATCH]
        batch = tokenizer(
            [texts[place] for place in places],
            padding=True,
            truncation=True,
            max_length=max_tokens,
            return_tensors="pt",
        )
        with torch.inference_mode():
            hidden = model(**batch).last_hidden_state
        means = (hidden * batch["attention_mask"].unsqueeze(-1)).sum(dim=1)
        dense[places] = torch.nn.functional.normalize(means, dim=-1).numpy()
        hidden = torch.nn.functional.normalize(hidden, dim=-1).half().numpy()
        lengths = batch["attention_mask"].sum(dim=1).tolist()
        states |= {place: hidden[row, : lengths[row]] for row, place in enumerate(places)}
    return [states[place] for place in range(len(texts))], dense


def measure_all(queries: States, rows: Sequence[npt.NDArray[np.floating[Any]]]) -> npt.NDArray[np.float32]:
    """Return the MaxSim of each query with each row, float32 [queries, n]."""
    own = np.concatenate(queries).astype(np.float32)
    bounds = np.cumsum([0, *map(len, queries[:-1])])
    parts = []
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        products = np.concatenate(part).astype(np.float32) @ own.T
        largest = np.maximum.reduceat(products, np.cumsum([0, *map(len, part[:-1])]), axis=0)
        parts.append(np.add.reduceat(largest, bounds, axis=1))
    scores: npt.NDArray[np.float32] = np.concatenate(parts).T
    return scores


def measure_ndcg(scores: npt.NDArray[np.float32], places: Sequence[int]) -> float:
    """Return the mean nDCG@10 of queries with one right document each, at `places` of their scores [queries, n]."""
    own = scores[np.arange(len(places)), places]
    ranks = (scores > own[:, np.newaxis]).sum(axis=1)
    return float(np.where(ranks < BEST, 1 / np.log2(ranks + 2), 0).mean())
