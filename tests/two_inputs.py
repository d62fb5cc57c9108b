"""A model of two inputs whose answers are bytes of any number: real processes, no model.

It reads, beside the ids, a type of each token, and answers with the text's own ids backwards, each with its type.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.encoder import Choice, DirectEncoder, EncoderOrder, EncoderReport
from worker.tokens.tokenized import TokenizedTexts
from worker.tokens.tokenizer import Tokenizer

SEPARATOR = 102
FAILING = 7561  # "error" in the packaged model's vocabulary


def type_of(ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """The second half of a text is of type 1."""
    return (np.arange(len(ids)) >= len(ids) // 2).astype(np.int32)


def answer(ids: NDArray[np.int32], types: NDArray[np.int32]) -> bytes:
    """What the model answers to one text. Texts of an odd number of tokens have half of it."""
    both = np.stack([ids, types], axis=1)[::-1].astype(np.int32)
    return both[: len(ids) // (1 + len(ids) % 2)].tobytes()


class TypedTokenizer(Tokenizer):
    """Gives each token a type as well."""

    def tokenize(self, texts: Sequence[str], max_tokens: int, truncate: bool) -> TokenizedTexts:
        return add_types(super().tokenize(texts, max_tokens, truncate))

    def tokenize_whole(self, texts: Sequence[str]) -> TokenizedTexts:
        return add_types(super().tokenize_whole(texts))


def add_types(texts: TokenizedTexts) -> TokenizedTexts:
    types = Ragged.from_rows([type_of(texts.ids(index)) for index in range(len(texts))], np.int32)
    return TokenizedTexts({**texts.inputs, "token_type_ids": types}, texts.truncated, texts.failures)


class AnsweringEncoder(DirectEncoder):
    def encode(self, batch: Batch) -> Ragged:
        ids, types = batch.inputs["input_ids"], batch.inputs["token_type_ids"]
        if FAILING in ids.covered:
            raise ValueError("a sequence the model cannot take")
        answers = [answer(ids.row(index), types.row(index)) for index in range(len(batch))]
        return Ragged.from_rows([np.frombuffer(each, np.uint8) for each in answers], np.uint8)

    def describe(self) -> EncoderReport:
        choice = Choice("fake", "for tests")
        return EncoderReport(choice, choice, choice, "none", 1, 0.0, is_packed=True, gives_vectors=False)


def load_answering_encoder(order: EncoderOrder) -> AnsweringEncoder:
    return AnsweringEncoder()


class WeighingEncoder(DirectEncoder):
    """Answers with float32: the ids of inner tokens as weights; for the token that fails one that is no number.

    Like the weights of words that a sparse model gives, equally long for hardly two texts.
    """

    def __init__(self, *, gives_vectors: bool) -> None:
        self._gives_vectors = gives_vectors

    def encode(self, batch: Batch) -> Ragged:
        ids = batch.inputs["input_ids"]
        return Ragged.from_rows([weigh(ids.row(index)) for index in range(len(batch))], np.float32)

    def describe(self) -> EncoderReport:
        choice = Choice("fake", "for tests")
        return EncoderReport(choice, choice, choice, "none", 1, 0.0, gives_vectors=self._gives_vectors)


def weigh(ids: NDArray[np.int32]) -> NDArray[np.float32]:
    return np.where(ids == FAILING, np.nan, ids)[1:-1].astype(np.float32)


def load_weighing_encoder(order: EncoderOrder) -> WeighingEncoder:
    return WeighingEncoder(gives_vectors=False)


def load_boastful_encoder(order: EncoderOrder) -> WeighingEncoder:
    return WeighingEncoder(gives_vectors=True)
