"""The task `embed`: compute a vector for each text.

A long text may be read in passages whose vectors are joined.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.encoding import LATE, PASSAGES, TRUNCATE, EncodingSpec
from vectormill.domain.errors import ModelError
from vectormill.domain.task import DENSE, has_token_ids
from vectormill.jobs.item import EMPTY_TEXT, ItemFailure
from vectormill.jobs.vector_failures import find_vector_failures
from vectormill.models.model_card import ModelCard
from vectormill.ragged import Ragged
from worker.batching.batch import OUTPUTS, PROMPT_LENGTH
from worker.encoder.outputs import BITS, POOLED, find_bits
from worker.tasks.finishing import (
    empty_rows,
    fail_unless,
    find_finite_rows,
    find_turned,
    finish_vectors,
    read_texts,
)
from worker.tasks.represent import Representing, find_changed_outputs, find_marks
from worker.tasks.task import Finished, RequestState
from worker.tokens.late import read_passages
from worker.tokens.passages import PassagedTexts, cut_passages
from worker.tokens.tokenized import INPUT_IDS, TokenizedTexts, lay_together
from worker.tokens.tokenizer import Tokenizer


class Embed:
    """The task `embed` of one model. Implements WorkerTask.

    `gives_vectors` is called once the model is loaded; if it returns False, the model's rows are passed on
    unchanged.
    """

    def __init__(
        self, card: ModelCard, tokenizer: Tokenizer, gives_vectors: Callable[[], bool] = lambda: True
    ) -> None:
        self._card = card
        self._tokenizer = tokenizer
        self._gives_vectors = gives_vectors
        self._canary_bits = find_bits(card.outputs)
        self._canary_tokens: set[int] = set()

    @property
    def dimension(self) -> int:
        """Return the dimension of the model's own vectors."""
        return self._card.dimension

    def canary(self, text: str) -> Mapping[str, Ragged]:
        """Return the inputs of a text that asks for all outputs of the model."""
        inputs = self._tokenizer.tokenize([text], self._card.max_tokens, truncate=True).inputs
        self._canary_tokens.add(len(inputs[INPUT_IDS].values))
        if not self._canary_bits:
            return inputs
        return {**inputs, OUTPUTS: Ragged.from_scalars(np.array([self._canary_bits], np.int32))}

    def find_flaw(self, results: Ragged, expected: "NDArray[Any]") -> str:
        if not self._canary_bits:
            return find_turned(results, expected)
        return find_changed_outputs(results, expected, self._canary_bits, self._canary_tokens, self._card)

    def begin(self, spec: EncodingSpec, texts: Sequence[bytes], max_chars: int) -> RequestState:
        if spec.outputs != DENSE:
            return self._represent(spec, texts, max_chars)
        if spec.long_texts == LATE:
            late = read_passages(self._tokenizer, self._card, spec, texts, max_chars)
            return Embedding(spec, *late, {OUTPUTS: BITS[POOLED]}, gives_vectors=self._gives_vectors())
        read, failures, constants = self._read(spec, texts, max_chars)
        return Embedding(spec, read, failures, constants, gives_vectors=self._gives_vectors())

    def _represent(self, spec: EncodingSpec, texts: Sequence[bytes], max_chars: int) -> RequestState:
        """Begin a request for other outputs, whose texts may be marked as queries or documents."""
        marks = find_marks(self._card, spec)
        bare = replace(spec, prompt=marks.prompt, max_tokens=marks.max_tokens)
        read, failures, constants = self._read(bare, texts, max_chars)
        marked = marks.put_into(read.sequences, self._tokenizer.num_prefix)
        return Representing(self._card, spec, marked, failures, constants)

    def _read(
        self, spec: EncodingSpec, texts: Sequence[bytes], max_chars: int
    ) -> tuple[PassagedTexts, dict[int, ItemFailure], dict[str, int]]:
        """Return the tokens of the texts, the failures among them, and the inputs that all share."""
        decoded, failures = read_texts(texts, max_chars)
        if spec.prompt:
            decoded = [spec.prompt + text for text in decoded]
        sound = (
            [index for index in range(len(texts)) if index not in failures] if failures else range(len(texts))
        )
        if spec.long_texts == PASSAGES:
            frame = self._tokenizer.frame(spec.prompt, spec.max_tokens, spec.passage_overlap)
            whole = self._tokenizer.tokenize_whole(decoded).spread(sound, len(texts))
            passaged = cut_passages(self._take_given(spec, texts, failures, whole), frame)
        else:
            tokenized = self._tokenizer.tokenize(
                decoded, spec.max_tokens, spec.long_texts == TRUNCATE, keeps_end=self._keeps_end(spec)
            )
            given = self._take_given(spec, texts, failures, tokenized.spread(sound, len(texts)))
            passaged = PassagedTexts.whole(
                self._tokenizer.refuse_without_room(given, spec.prompt, spec.max_tokens)
            )
        prompt_length = 0 if self._card.include_prompt else self._tokenizer.count_prompt_tokens(spec.prompt)
        return passaged, failures, {PROMPT_LENGTH: prompt_length}

    def _keeps_end(self, spec: EncodingSpec) -> bool:
        """Return True if long texts lose their beginning, and the spec is not one of a release that cut their end."""
        return self._card.truncates_left and not self._card.reads_as_before(spec.revision)

    def _take_given(
        self,
        spec: EncodingSpec,
        texts: Sequence[bytes],
        failures: dict[int, ItemFailure],
        tokenized: TokenizedTexts,
    ) -> TokenizedTexts:
        """Add the texts that were sent as token ids to `tokenized`, and remove them from `failures`."""
        places = [place for place in failures if has_token_ids(texts[place])]  # they are not Unicode
        if not places:
            return tokenized
        for place in places:
            del failures[place]
        max_tokens = None if spec.long_texts == PASSAGES else spec.max_tokens
        given = self._tokenizer.take_ids(
            [texts[place] for place in places],
            spec.prompt,
            max_tokens,
            spec.long_texts == TRUNCATE,
            keeps_end=self._keeps_end(spec),
        )
        return lay_together(tokenized, given.spread(places, len(texts)))


class Embedding:
    """The state of one embed request. Implements RequestState."""

    def __init__(
        self,
        spec: EncodingSpec,
        texts: PassagedTexts,
        failures: Mapping[int, ItemFailure],
        constants: Mapping[str, int],
        *,
        gives_vectors: bool = True,
    ) -> None:
        """Begin the request. `failures` are those of whole texts, by index."""
        self._gives_vectors = gives_vectors
        self.constants = constants
        self._spec = spec
        self._texts = texts
        self._failures: dict[int, ItemFailure] = dict(texts.sequences.failures)
        self._failed_texts = failures
        # Where no special tokens are added, a text may have no token at all, and would have the vector 0.
        for place in np.flatnonzero(texts.sequences.lengths == 0).tolist():
            self._failures.setdefault(
                place, ItemFailure(EMPTY_TEXT, "the text has no token that the model knows")
            )
        self._results: Ragged | None = None

    def start(self) -> TokenizedTexts:
        return self._texts.sequences

    def take(self, results: Ragged, failures: Mapping[int, ItemFailure]) -> None:
        self._results = results
        self._failures |= failures

    def finish(self) -> Finished:
        assert self._results is not None
        texts = self._texts
        failures = {**texts.join_failures(self._failures), **self._failed_texts}
        lengths, truncated, num_passages = texts.num_tokens, texts.truncated, texts.num_passages
        results = self._results
        if self._gives_vectors:
            vectors = finish_vectors(texts.join_vectors(results), self._spec)
            failures = {**find_vector_failures(vectors), **failures}
            vectors[list(failures)] = 0
            results = Ragged.from_matrix(vectors)
        elif texts.is_whole:
            fail_unless(find_finite_rows(results), failures)
            results = empty_rows(results, list(failures))
        else:
            raise ModelError(
                "Only vectors of passages can be joined; submit the job with a different long_texts."
            )
        failed = list(failures)
        lengths[failed], truncated[failed], num_passages[failed] = 0, False, 0
        return Finished(results, failures, lengths, truncated, num_passages)
