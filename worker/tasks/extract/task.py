"""Extract: records of a schema from each text. Joins an Extraction to the engine; knows neither a model nor batches."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.tasks.schema import Schema
from vectormill.jobs.item import ItemFailure
from vectormill.ragged import Ragged
from worker.tasks.course import Finished
from worker.tasks.extract.decode import CELL_WIDTH
from worker.tasks.extract.extraction import Extraction, Prompts
from worker.tasks.extract.layout import IS_BLANK
from worker.tasks.extract.prompt_tokenizer import PromptTokenizer
from worker.tasks.finishing import read_texts
from worker.tasks.likeness import find_changed
from worker.tokens.tokenized import INPUT_IDS, TokenizedTexts

# The text of the canary, which has to be read like any text.
SMALL_SCHEMA: Final[Schema] = {"a": None}


class Extract:
    """Implements WorkerTask."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = PromptTokenizer(directory)

    def begin(self, spec: EncodingSpec, texts: Sequence[bytes], max_chars: int) -> "ExtractCourse":
        decoded, failures = read_texts(texts, max_chars)
        sound = [index for index in range(len(texts)) if index not in failures]
        schema, confidences = json.loads(spec.extract_schema), spec.confidences
        extraction = Extraction(self._tokenizer, schema, decoded, with_confidences=confidences)
        return ExtractCourse(extraction, sound, failures, len(texts))

    def canary(self, text: str) -> Mapping[str, Ragged]:
        prompts = Extraction(self._tokenizer, SMALL_SCHEMA, [text]).start()
        assert prompts is not None
        inputs = lay_out(prompts).inputs
        # A blank sequence has the same cells back whatever their signs: how many there are else hangs on logits
        # near 0, and where a model finds nothing in this text there would be none to compare.
        return {**inputs, IS_BLANK: Ragged.from_scalars(np.ones(len(prompts), dtype=np.int32))}

    def find_flaw(self, results: Ragged, expected: "NDArray[Any]") -> str:
        """Return what is wrong with a canary's cells and logits; empty if they are nearly the same."""
        if (results.lengths != len(expected)).any() or len(expected) < 1 + CELL_WIDTH:
            return "its answer has another number of cells"
        known = expected[1:].reshape(-1, CELL_WIDTH)
        cells = results.matrix[:, 1:].reshape(len(results), -1, CELL_WIDTH)
        if (results.matrix[:, 0] != expected[0]).any() or (cells[:, :, :2] != known[:, :2]).any():
            return "its answer is of other cells"
        logits = np.ascontiguousarray(cells[:, :, 2:]).reshape(len(results), -1)
        return find_changed(Ragged.from_matrix(logits), known[:, 2:].ravel())


class ExtractCourse:
    """Implements Course. `sound` are the places, among all texts, of those that are read."""

    prompt_length = 0

    def __init__(
        self,
        extraction: Extraction,
        sound: Sequence[int],
        failures: Mapping[int, ItemFailure],
        num_texts: int,
    ) -> None:
        self._extraction = extraction
        self._sound = np.array(sound, dtype=np.int64)
        self._failures = dict(failures)
        self._num_tokens = np.zeros(num_texts, dtype=np.int32)

    def start(self) -> TokenizedTexts:
        prompts = self._extraction.start()
        return EMPTY if prompts is None else self._give(prompts)

    def take(self, results: Ragged, failures: Mapping[int, ItemFailure]) -> TokenizedTexts | None:
        prompts = self._extraction.take(results, failures)
        return None if prompts is None else self._give(prompts)

    def finish(self) -> Finished:
        num_texts = len(self._num_tokens)
        rows = [b""] * num_texts
        for place, answer in zip(self._sound.tolist(), self._extraction.finish(), strict=True):
            if isinstance(answer, ItemFailure):
                self._failures[place] = answer
            else:
                rows[place] = json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
        failed = list(self._failures)
        # A text of which something was not asked is told as one that was cut: nothing is left out in silence.
        truncated = np.zeros(num_texts, dtype=np.bool_)
        truncated[self._sound] = np.array(self._extraction.num_left_out, dtype=np.int64) > 0
        self._num_tokens[failed], truncated[failed] = 0, False
        return Finished(
            Ragged.from_rows([np.frombuffer(row, dtype=np.uint8) for row in rows], np.uint8),
            self._failures,
            self._num_tokens,
            truncated,
            np.zeros(num_texts, dtype=np.int32),
        )

    def _give(self, prompts: Prompts) -> TokenizedTexts:
        sequences = lay_out(prompts)
        np.add.at(self._num_tokens, self._sound[prompts.texts], sequences.lengths.astype(np.int32))
        return sequences


def lay_out(prompts: Prompts) -> TokenizedTexts:
    """Return the sequences with every input named, since those of many requests share a batch."""
    blank = Ragged.from_scalars(np.zeros(len(prompts), dtype=np.int32))
    inputs = {IS_BLANK: blank, **prompts.inputs}
    return TokenizedTexts(inputs, np.zeros(len(prompts), dtype=np.bool_), {})


EMPTY: Final = TokenizedTexts({INPUT_IDS: Ragged.from_rows([], np.int32)}, np.zeros(0, dtype=np.bool_), {})
