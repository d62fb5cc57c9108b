"""Tokenizer turns texts into token ids as transformers does, but with the Rust library alone.

One object serves all threads and every max_tokens. Truncation is done here, because the library's setting is
shared by all callers. Like the library, it truncates a text's own tokens before special ones are added. It
knows nothing about batches.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.errors import ModelError
from vectormill.domain.task import LARGEST_ID, read_token_ids
from vectormill.jobs.item import ENCODING_FAILED, TOO_MANY_TOKENS, ItemFailure
from vectormill.models.model_card import ModelCard, SpecialTokens
from vectormill.models.prompt_room import tell_no_room
from vectormill.ragged import Ragged
from worker.tokens.pairs import PairFrame, find_frame
from worker.tokens.reference import NO_SPECIAL, Reference
from worker.tokens.splitting import find_cuts, find_splitting
from worker.tokens.tokenized import INPUT_IDS, TOKEN_TYPE_IDS, TokenizedTexts, drop_rows, report_length
from worker.tokens.word_cache import WordCache, WordTally

logger = logging.getLogger(__name__)

# Characters for each token at which a long text is first cut. If they give too few tokens, twice as many are
# read, so the first tokens of a text cost the same whatever follows them.
CHARS_PER_TOKEN: Final = 6
# The number of sample texts to test joining, and more tokens than any two of them have.
PAIRS_TRIED: Final = 20
# With this many free cores the library is faster: it takes three times the processor time of looking up known
# words, but runs on all cores and without the GIL, which look-ups hold.
LIBRARY_CORES: Final = 4
LARGEST_PAIR: Final = 1 << 20
# Texts of many kinds and languages, which calibration uses too.
SAMPLE: Final = files("worker").joinpath("calibration_texts.txt")


@dataclass(frozen=True, slots=True)
class PassageFrame:
    """The rules for cutting windows of `max_tokens`, with neighbours that overlap by `overlap` tokens.

    `max_tokens` includes what surrounds each window: the leading tokens of the text that equal `leading_ids`
    (the special ones and the prompt's), and the last `num_suffix` tokens of the text.
    """

    max_tokens: int
    overlap: int
    leading_ids: NDArray[np.int32]
    num_suffix: int


class Tokenizer:
    """Tokenizes with the `tokenizer.json` of a model's directory. Thread-safe.

    `way` says in words how: word by word, or each text whole and why.
    """

    def __init__(
        self,
        directory: Path,
        *,
        lowercase: bool = False,
        words: WordTally | None = None,
        num_free_cores: int = 0,
        special: SpecialTokens = NO_SPECIAL,
    ) -> None:
        """Load the tokenizer and choose the fastest exact way to use it.

        Words are counted in `words`. On `num_free_cores` cores only the tokenizer runs. `special` are
        those of the model's card, which replace the tokenizer's own if they are rewritten.
        """
        self._reference = Reference(directory, lowercase=lowercase, special=special)
        description = self._reference.description
        self._encoding, self.way = _choose_way(self._reference, words or WordTally(), num_free_cores)
        logger.info("Tokenizing texts %s.", self.way)
        self._cuts = find_cuts(description)
        self._special_ids = frozenset(
            token["id"] for token in description.get("added_tokens", []) if token.get("special")
        )
        self._num_suffix = len(self._reference.suffix)

    @property
    def num_prefix(self) -> int:
        """Return the number of special tokens before a text."""
        return len(self._reference.prefix)

    def tokenize(
        self, texts: Sequence[str], max_tokens: int, truncate: bool, *, keeps_end: bool = False
    ) -> TokenizedTexts:
        """Return the token ids of all texts, each at most `max_tokens`.

        A longer text loses its end, or its beginning if `keeps_end`; or it fails if `truncate` is False.
        """
        reads_all = keeps_end or not truncate
        rows = self._encoding.encode(texts) if reads_all else self._encode_beginnings(texts, max_tokens)[0]
        return self._fit(rows, max_tokens, truncate, keeps_end)

    def take_ids(
        self,
        texts: Sequence[bytes],
        prompt: str,
        max_tokens: int | None,
        truncate: bool,
        *,
        keeps_end: bool = False,
    ) -> TokenizedTexts:
        """Return texts that are given as token ids, checked as in `tokenize`.

        No limit if `max_tokens` is None.
        """
        prefix, suffix = (np.array(ids, np.int32) for ids in (self._reference.prefix, self._reference.suffix))
        whole = np.array(self._reference.encode_one(prompt) if prompt else [*prefix, *suffix], np.int32)
        before = whole[: len(whole) - len(suffix)]
        read: list[NDArray[np.int32] | ItemFailure] = []
        for text in texts:
            ids = self._read_ids(text)
            if not isinstance(ids, ItemFailure):
                # Special tokens that are there already are not repeated.
                end = len(ids) - len(suffix)
                has_prefix = len(prefix) and np.array_equal(ids[: len(prefix)], prefix)
                has_suffix = len(suffix) and np.array_equal(ids[end:], suffix)
                if has_prefix and has_suffix and end >= len(prefix):
                    ids = ids[len(prefix) : end]
                ids = np.concatenate([before, ids, suffix])
            read.append(ids)
        nothing = np.zeros(0, np.int32)
        rows = Ragged.from_rows([nothing if isinstance(ids, ItemFailure) else ids for ids in read], np.int32)
        longest = int(rows.lengths.max(initial=0)) if max_tokens is None else max_tokens
        fitted = self._fit(rows, longest, truncate, keeps_end)
        unread = {index: ids for index, ids in enumerate(read) if isinstance(ids, ItemFailure)}
        return TokenizedTexts(fitted.inputs, fitted.truncated, {**fitted.failures, **unread})

    def _read_ids(self, text: bytes) -> NDArray[np.int32] | ItemFailure:
        """Return the token ids that a text is given as, or the reason why the model cannot read it."""
        try:
            ids = read_token_ids(text)
        except ValueError:
            return ItemFailure(ENCODING_FAILED, "the text is neither Unicode nor a list of token ids")
        largest = min(self._reference.rust.get_vocab_size() - 1, LARGEST_ID)
        for place, number in enumerate(ids):
            if not 0 <= number <= largest:
                return ItemFailure(
                    ENCODING_FAILED,
                    f"token {place} has the id {number}, but the model's ids are 0 to {largest}; ids of another "
                    "vocabulary, such as tiktoken's, mean different words here: send the text itself",
                )
        return np.array(ids, dtype=np.int32)

    def _fit(self, rows: Ragged, max_tokens: int, truncate: bool, keeps_end: bool) -> TokenizedTexts:
        """Return the rows as texts. A row of more than `max_tokens` is truncated, or fails."""
        is_long = rows.lengths > max_tokens
        if not is_long.any():
            return TokenizedTexts({INPUT_IDS: rows}, is_long, {})
        if truncate:
            # A longer row keeps its first ids and its last ones, `num_behind` of them.
            num_behind = max_tokens - self.num_prefix if keeps_end else self._num_suffix
            places = np.arange(len(rows.values))
            from_start = places - np.repeat(rows.offsets[:-1], rows.lengths)
            from_end = np.repeat(rows.offsets[1:], rows.lengths) - places
            is_kept = (from_start < max_tokens - num_behind) | (from_end <= num_behind)
            kept = Ragged.from_lengths(rows.values[is_kept], np.minimum(rows.lengths, max_tokens))
            return TokenizedTexts({INPUT_IDS: kept}, is_long, {})
        failures = {
            index: report_length(length, max_tokens)
            for index, length in enumerate(rows.lengths.tolist())
            if length > max_tokens
        }
        return TokenizedTexts(drop_rows({INPUT_IDS: rows}, is_long), np.zeros_like(is_long), failures)

    def tokenize_whole(self, texts: Sequence[str]) -> TokenizedTexts:
        """Return the token ids of all texts, whatever their length."""
        return TokenizedTexts({INPUT_IDS: self._encoding.encode(texts)}, np.zeros(len(texts), np.bool_), {})

    def encode_with_characters(self, texts: Sequence[str]) -> tuple[Ragged, Ragged]:
        """Return the token ids of all texts, and for each token from which character up to which it is."""
        return self._reference.encode_with_characters(texts)

    def tokenize_pairs(
        self, first: Sequence[str], second: Sequence[str], max_tokens: int, truncate: bool
    ) -> TokenizedTexts:
        """Return the token ids and types of n pairs of texts, each pair at most `max_tokens`.

        Of a longer pair, the longer text is truncated, or the pair fails if `truncate` is False. All pairs
        fail if the tokenizer does not support pairs.
        """
        if not first:
            return _fail_pairs(0, ENCODING_FAILED, "")  # with no pairs, the tokenizer need not support them
        try:
            frame = self._pair_frame
        except ModelError as error:
            return _fail_pairs(len(first), ENCODING_FAILED, str(error))
        if max_tokens < frame.num_special + 2:
            least = f"a pair needs at least {frame.num_special + 2} tokens, and {max_tokens} are allowed"
            return _fail_pairs(len(first), TOO_MANY_TOKENS, least)
        both = [*first, *second]
        if truncate:
            rows, is_cut = self._encode_beginnings(
                both, max_tokens + len(self._reference.prefix) + self._num_suffix
            )
            # If both texts are long, their true lengths may decide which one keeps a token more.
            is_long_pair = (rows.lengths > max_tokens // 2).reshape(2, -1).all(axis=0)
            rows = self._encode_again(both, rows, np.flatnonzero(is_cut & np.tile(is_long_pair, 2)))
        else:
            rows = self._encoding.encode(both)
        own = _strip(rows, len(self._reference.prefix), self._num_suffix)
        texts, others = own.part(0, len(first)), own.part(len(first), len(own))
        inputs, is_long = frame.join(texts, others, max_tokens)
        if truncate or not is_long.any():
            return TokenizedTexts(inputs, is_long, {})
        lengths = texts.lengths + others.lengths + frame.num_special
        failures = {
            index: report_length(int(lengths[index]), max_tokens)
            for index in np.flatnonzero(is_long).tolist()
        }
        return TokenizedTexts(drop_rows(inputs, is_long), np.zeros_like(is_long), failures)

    def encode_between(
        self, texts: Sequence[str], around: Sequence[tuple[str, str]], limit: int | None
    ) -> Ragged:
        """Return the tokens of n texts between two others each, as one text and without special tokens.

        With a `limit` only the beginning of a long text may be read; what is returned then has more tokens
        than the limit, and ends with those of the text behind.
        """
        if limit is None:
            rows = self._encoding.encode(_join(texts, around))
        else:
            extra = len(self._reference.prefix) + self._num_suffix
            rows, _ = self._encode_beginnings(texts, limit + extra, around)
        return _strip(rows, len(self._reference.prefix), self._num_suffix)

    @cached_property
    def _pair_frame(self) -> PairFrame:
        """Return the frame of pairs. Raise ModelError unless sample pairs have the tokens of their texts."""
        frame = find_frame(self._reference.rust, favors_longer=self._reference.favors_longer)
        sample = [line for line in SAMPLE.read_text(encoding="utf-8").splitlines() if line][:PAIRS_TRIED]
        own = _strip(self._encoding.encode(sample), len(self._reference.prefix), self._num_suffix)
        others = sample[::-1]
        inputs, _ = frame.join(own, own.take(np.arange(len(sample))[::-1]), LARGEST_PAIR)
        for index, pair in enumerate(zip(sample, others, strict=True)):
            whole = self._reference.rust.encode(*pair)
            found = [inputs[name].row(index).tolist() for name in (INPUT_IDS, TOKEN_TYPE_IDS)]
            if found != [whole.ids, whole.type_ids]:
                raise ModelError(
                    "The tokenizer encodes two texts differently as a pair than one by one; pairs are not supported."
                )
        return frame

    def frame(self, prompt: str, max_tokens: int, overlap: int) -> PassageFrame:
        """Return the rules for cutting texts with this prompt into passages."""
        ids = np.array(self._reference.encode_one(prompt), dtype=np.int32)
        return PassageFrame(max_tokens, overlap, ids[: len(ids) - self._num_suffix], self._num_suffix)

    def count_prompt_tokens(self, prompt: str) -> int:
        """Return the number of a prompt's leading tokens, without a final special token."""
        if not prompt:
            return 0
        ids = self._reference.encode_one(prompt)
        return len(ids) - (1 if ids and ids[-1] in self._special_ids else 0)

    def refuse_without_room(self, texts: TokenizedTexts, prompt: str, max_tokens: int) -> TokenizedTexts:
        """Return the texts, of which those that were cut fail if the prompt leaves no room for one of their tokens."""
        is_cut, num_around = texts.truncated, self.num_prefix + self._num_suffix
        if prompt and is_cut.any():
            num_around = len(self._reference.encode_one(prompt))
        if num_around < max_tokens or not is_cut.any():
            return texts
        failure = ItemFailure(TOO_MANY_TOKENS, tell_no_room(prompt, num_around, max_tokens))
        failures = {**texts.failures, **dict.fromkeys(np.flatnonzero(is_cut).tolist(), failure)}
        return TokenizedTexts(drop_rows(texts.inputs, is_cut), np.zeros_like(is_cut), failures)

    def _encode_beginnings(
        self, texts: Sequence[str], max_tokens: int, around: Sequence[tuple[str, str]] | None = None
    ) -> tuple[Ragged, NDArray[np.bool_]]:
        """Return the token ids of all texts, and which texts were cut before tokenization.

        A text that is cut still has more than `max_tokens`. `around` is put around the texts after cutting.
        """
        num_chars = max_tokens * CHARS_PER_TOKEN
        given = [self._cut_text(text, num_chars) for text in texts]
        rows = self._encoding.encode(_join(given, around))
        is_cut = _find_cut(texts, given)
        while len(short := np.flatnonzero(is_cut & (rows.lengths <= max_tokens))):
            num_chars *= 2
            for index in short.tolist():
                given[index] = self._cut_text(texts[index], num_chars)
            rows = self._encode_again(_join(given, around), rows, short)
            is_cut = _find_cut(texts, given)
        return rows, is_cut

    def _cut_text(self, text: str, num_chars: int) -> str:
        """Return the beginning of a long text, so that a whole book is not tokenized for its first page.

        Texts are cut only at places where the tokens before do not change.
        """
        if self._cuts is None or len(text) <= 2 * num_chars:
            return text
        place = self._cuts.search(text, num_chars)
        return text if place is None else text[: place.start()]

    def _encode_again(self, texts: Sequence[str], rows: Ragged, chosen: NDArray[np.int64]) -> Ragged:
        """Return the rows with the chosen texts tokenized again."""
        if not len(chosen):
            return rows
        places = np.arange(len(texts))
        places[chosen] = len(texts) + np.arange(len(chosen))
        again = self._encoding.encode([texts[index] for index in chosen.tolist()])
        return Ragged.join([rows, again]).take(places)


def _join(texts: Sequence[str], around: Sequence[tuple[str, str]] | None) -> Sequence[str]:
    if around is None:
        return texts
    return [f"{before}{text}{behind}" for text, (before, behind) in zip(texts, around, strict=True)]


def _find_cut(texts: Sequence[str], given: Sequence[str]) -> NDArray[np.bool_]:
    """Return which texts were shortened [n]."""
    is_cut = (part is not text for text, part in zip(texts, given, strict=True))
    return np.fromiter(is_cut, np.bool_, count=len(texts))


def _choose_way(
    reference: Reference, words: WordTally, num_free_cores: int
) -> tuple[Reference | WordCache, str]:
    """Return the fastest exact way to tokenize, and a phrase that says why.

    What the tokenizer's parts promise is tested on a sample first.
    """
    if num_free_cores >= LIBRARY_CORES:
        return reference, f"whole, because {num_free_cores} cores tokenize at the same time"
    splitting = find_splitting(reference.description)
    if splitting is None:
        return reference, "whole, because this tokenizer's parts are not known to read each word alone"
    cache = WordCache(reference, splitting, words)
    sample = SAMPLE.read_text(encoding="utf-8").splitlines()
    expected = reference.encode(sample)
    for _ in range(2):  # the second time, words come from the cache
        found = cache.encode(sample)
        if found.values.tobytes() != expected.values.tobytes() or (found.offsets != expected.offsets).any():
            logger.warning(
                "Words have different tokens alone than in a text, so this tokenizer does not cache words."
            )
            return reference, "whole, because words had different tokens alone than in a text"
    words.forget()  # forget the counts of the sample
    return cache, "word by word"


def _fail_pairs(num_pairs: int, code: str, detail: str) -> TokenizedTexts:
    nothing = Ragged.from_lengths(np.zeros(0, np.int32), np.zeros(num_pairs, np.int64))
    return TokenizedTexts(
        {INPUT_IDS: nothing, TOKEN_TYPE_IDS: nothing},
        np.zeros(num_pairs, dtype=np.bool_),
        dict.fromkeys(range(num_pairs), ItemFailure(code, detail)),
    )


def _strip(rows: Ragged, num_prefix: int, num_suffix: int) -> Ragged:
    """Return the rows without their first `num_prefix` and last `num_suffix` values."""
    places = np.arange(len(rows.values)) - np.repeat(rows.offsets[:-1], rows.lengths)
    is_own = (places >= num_prefix) & (places < np.repeat(rows.lengths - num_suffix, rows.lengths))
    return Ragged.from_lengths(rows.values[is_own], rows.lengths - num_prefix - num_suffix)


class StaticTokenizer(Tokenizer):
    """The tokenizer of a table of static embeddings, which adds no special tokens. Thread-safe.

    By model2vec's rules (`StaticModel.encode`), a text is cut to `max_tokens` times the median length of a
    token in characters, then tokenized and cut to `max_tokens`, and then unknown tokens are left out.
    """

    def __init__(self, card: ModelCard, **options: Any) -> None:
        assert card.static is not None
        super().__init__(card.path / card.static.folder, special=SpecialTokens(is_rewritten=True), **options)
        self._unknown_id: int | None = None
        self._chars_per_token = 0
        if card.static.is_model2vec:
            rust, model = self._reference.rust, self._reference.description["model"]
            token = model.get("unk_token")
            self._unknown_id = model.get("unk_id") if token is None else rust.token_to_id(token)
            self._chars_per_token = int(np.median([len(token) for token in rust.get_vocab()]))

    def tokenize(
        self, texts: Sequence[str], max_tokens: int, truncate: bool, *, keeps_end: bool = False
    ) -> TokenizedTexts:
        if not truncate or not self._chars_per_token:
            return super().tokenize(texts, max_tokens, truncate)
        num_chars = max_tokens * self._chars_per_token
        found = super().tokenize([text[:num_chars] for text in texts], max_tokens, truncate)
        is_cut = np.fromiter((len(text) > num_chars for text in texts), np.bool_, count=len(texts))
        return replace(found, truncated=found.truncated | is_cut)

    def tokenize_whole(self, texts: Sequence[str]) -> TokenizedTexts:
        found = super().tokenize_whole(texts)
        return replace(found, inputs={INPUT_IDS: self._drop_unknown(found.inputs[INPUT_IDS])})

    def _fit(self, rows: Ragged, max_tokens: int, truncate: bool, keeps_end: bool) -> TokenizedTexts:
        found = super()._fit(rows, max_tokens, truncate, keeps_end)
        return replace(found, inputs={INPUT_IDS: self._drop_unknown(found.inputs[INPUT_IDS])})

    def _drop_unknown(self, rows: Ragged) -> Ragged:
        is_known = rows.values != self._unknown_id
        if self._unknown_id is None or is_known.all():
            return rows
        before = np.concatenate(([0], np.cumsum(is_known)))
        return Ragged(rows.values[is_known], before[rows.offsets])
