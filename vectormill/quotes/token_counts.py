"""Token counts of sampled texts: what a model reads of each, counted with its own tokenizer where it has one."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from vectormill.domain.encoding import FAIL, IN_WINDOWS, LATE, TRUNCATE, EncodingSpec
from vectormill.domain.schema import PromptEstimate
from vectormill.jobs.chunk import USUAL_SPECIAL_TOKENS, estimate_tokens
from vectormill.jobs.item import split_pair
from vectormill.models.model_card import ModelCard
from vectormill.models.prompt_room import open_tokenizer
from vectormill.quotes.sample import KEPT_BYTES, SampledRow

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# At most this number of bytes of the sampled texts is tokenized, which takes a few seconds of one core.
MOST_BYTES: Final = 4 << 20
# A text that will be cut is tokenized up to so many bytes for each token that the model reads of it.
BYTES_PER_TOKEN: Final = 32


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The tokens [n] that a model reads of some texts, and which [n] of these texts have more than it reads at once.

    `num_estimated` [n] are those of them that follow from the number of bytes. `is_exact` says whether the model's
    tokenizer counted the others; without it all are estimated.
    """

    num_tokens: npt.NDArray[np.int64]
    num_estimated: npt.NDArray[np.int64]
    is_long: npt.NDArray[np.bool_]
    is_exact: bool


def count_tokens(card: ModelCard, spec: EncodingSpec, rows: Sequence[SampledRow]) -> TokenCounts:
    """Count the tokens of random rows, as many as MOST_BYTES allows and at least one.

    Of a text that is longer than what is tokenized of it, the other tokens are as many as its bytes let expect.
    Prompts and special tokens are included, the words of a reranker's template are not.
    """
    texts, times = _take(spec, rows)
    if spec.extract_schema:
        prompts = PromptEstimate(json.loads(spec.extract_schema), estimate_tokens)
        lengths = (times * [estimate_tokens(text) for text in texts]).astype(np.int64)
        counted = np.array([prompts.of(length) for length in lengths.tolist()], dtype=np.int64)
        return TokenCounts(counted, counted, np.zeros(len(texts), dtype=np.bool_), is_exact=False)
    tokenizer = open_tokenizer(card.path / "tokenizer.json")
    is_exact = tokenizer is not None
    if tokenizer is not None:
        counted, num_around = _tokenize(tokenizer, spec.prompt, texts, lowercase=card.lowercase)
    else:
        num_around = estimate_tokens(spec.prompt.encode()) + USUAL_SPECIAL_TOKENS
        counted = np.array([estimate_tokens(text) + num_around for text in texts], dtype=np.int64)
    lengths = num_around + ((counted - num_around) * times).astype(np.int64)
    read = _find_read(spec, lengths, num_around)
    estimated = np.abs(read - _find_read(spec, counted, num_around)) if is_exact else read
    return TokenCounts(read, estimated, lengths > spec.max_tokens, is_exact)


def _find_read(spec: EncodingSpec, lengths: npt.NDArray[np.int64], num_around: int) -> npt.NDArray[np.int64]:
    """Return the tokens [n] that a model reads of texts with so many [n], of which `num_around` are around each."""
    is_long = lengths > spec.max_tokens
    if spec.long_texts == FAIL:
        return np.where(is_long, 0, lengths)
    if spec.long_texts in IN_WINDOWS:
        room = max(1, spec.max_tokens - num_around)
        stride = max(1, room - spec.passage_overlap)
        windows = -(-(lengths - num_around - room) // stride) + 1
        return np.where(is_long, windows * spec.max_tokens, lengths)
    return np.minimum(lengths, spec.max_tokens)


def _take(spec: EncodingSpec, rows: Sequence[SampledRow]) -> tuple[list[bytes], npt.NDArray[np.float64]]:
    """Return what is tokenized of random rows, and how many times [n] as long each of their texts is."""
    limit = BYTES_PER_TOKEN * spec.max_tokens if spec.long_texts == TRUNCATE else KEPT_BYTES
    texts: list[bytes] = []
    times: list[float] = []
    num_left = MOST_BYTES
    for place in np.random.default_rng(0).permutation(len(rows)):
        if num_left <= 0:
            break
        # Only the passage of such a pair is counted, since all passages of a text are about as long as it.
        passage, whole = split_pair(rows[place].text) if spec.long_texts == LATE else (rows[place].text, None)
        texts.append(passage[:limit])
        times.append(1.0 if whole is not None else rows[place].num_bytes / max(1, len(texts[-1])))
        num_left -= len(texts[-1])
    return texts, np.array(times)


def _tokenize(
    tokenizer: "Tokenizer", prompt: str, texts: Sequence[bytes], *, lowercase: bool
) -> tuple[npt.NDArray[np.int64], int]:
    """Return the tokens [n] of each text with what the model puts around it, and how many those are."""
    given: list[str | tuple[str, str]] = []
    for text in texts:
        first, second = (
            None if side is None else side.decode("utf-8", "replace") for side in split_pair(text)
        )
        first = f"{prompt}{first}"
        first, second = (side.lower() if side and lowercase else side for side in (first, second))
        given.append(first or "" if second is None else (first or "", second))
    lengths = [len(encoding) for encoding in tokenizer.encode_batch_fast(given)]
    return np.array(lengths, dtype=np.int64), len(tokenizer.encode(prompt))
