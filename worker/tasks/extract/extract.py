"""The task `extract`: connect the extraction of records from texts, by the model of any author, to the engine.

An author's model says how a schema is asked and how its answers become records (`Author`, `Course`), and which
network answers (`ExtractionEncoder`). Everything else is common: reading texts, known texts, failures, counts,
and records as JSON. An answer is a row of cells of four numbers, the last two of which are logits or ranks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.schema import Schema
from vectormill.jobs.item import ItemFailure
from vectormill.ragged import Ragged
from worker.tasks.extract.prompts import IS_BLANK
from worker.tasks.extract.records import CELL_WIDTH, Record
from worker.tasks.finishing import find_changed, read_texts
from worker.tasks.task import Finished, Rounds
from worker.tokens.tokenized import TokenizedTexts


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """The sequences of one level of all texts.

    Sequence i belongs to text `texts[i]`; each input has a row for it.
    """

    inputs: Mapping[str, Ragged]
    texts: NDArray[np.int32]  # [n]

    def __len__(self) -> int:
        return len(self.texts)


class Course(Protocol):
    """The extraction of one schema from many texts, in rounds of sequences."""

    @property
    def num_left_out(self) -> list[int]:
        """Return for each text how much of it or of the schema was left out."""

    def start(self) -> Prompts | None:
        """Return the first sequences; None if there is nothing to ask."""

    def take(self, results: Ragged, failures: Mapping[int, ItemFailure] | None = None) -> Prompts | None:
        """Take a row of results for each of the last sequences, and return the next ones; None at the end."""

    def finish(self) -> list[list[Record] | ItemFailure]:
        """Return for each text its records, or its failure."""


class Author(Protocol):
    """One author's model as it asks for the types of a schema. May be used by several threads."""

    def begin(self, schema: Schema, texts: Sequence[str], *, with_confidences: bool) -> Course:
        """Begin to extract the schema, which has been checked, from texts that can be read."""


# Known texts are asked for this, and encoded like any other text.
SMALL_SCHEMA: Final[Schema] = {"a": None}


class Extract:
    """The task `extract` of one model. Implements WorkerTask."""

    asks_again = True

    def __init__(self, author: Author) -> None:
        self._author = author

    def process(self, spec: EncodingSpec, texts: Sequence[bytes], max_chars: int) -> Rounds:
        decoded, failures = read_texts(texts, max_chars)
        sound = np.array([index for index in range(len(texts)) if index not in failures], dtype=np.int64)
        schema, confidences = json.loads(spec.extract_schema), spec.confidences
        course = self._author.begin(schema, decoded, with_confidences=confidences)
        num_tokens = np.zeros(len(texts), dtype=np.int32)
        prompts = course.start()
        while prompts is not None:
            sequences = name_inputs(prompts)
            np.add.at(num_tokens, sound[prompts.texts], sequences.lengths.astype(np.int32))
            prompts = course.take(*(yield sequences, {}))
        rows = [b""] * len(texts)
        for place, answer in zip(sound.tolist(), course.finish(), strict=True):
            if isinstance(answer, ItemFailure):
                failures[place] = answer
            else:
                rows[place] = json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
        # A text for which types were left out is reported as truncated, so that nothing is left out silently.
        truncated = np.zeros(len(texts), dtype=np.bool_)
        truncated[sound] = np.array(course.num_left_out, dtype=np.int64) > 0
        records = Ragged.from_rows([np.frombuffer(row, dtype=np.uint8) for row in rows], np.uint8)
        return Finished.of(records, failures, num_tokens, truncated)

    def make_known_inputs(self, text: str) -> Mapping[str, Ragged]:
        prompts = self._author.begin(SMALL_SCHEMA, [text], with_confidences=False).start()
        assert prompts is not None
        inputs = name_inputs(prompts).inputs
        # A blank sequence returns the same cells whatever their signs. Otherwise their number would depend on
        # logits near 0, and a model that finds nothing in this text would return none to compare.
        return {**inputs, IS_BLANK: Ragged.from_scalars(np.ones(len(prompts), dtype=np.int32))}

    def find_flaw(self, results: Ragged, expected: "NDArray[Any]") -> str:
        """Return what is wrong with the cells and logits of a known text; empty if they are nearly as expected."""
        if (results.lengths != len(expected)).any() or len(expected) < 1 + CELL_WIDTH:
            return "its answer has a different number of cells"
        known = expected[1:].reshape(-1, CELL_WIDTH)
        cells = results.matrix[:, 1:].reshape(len(results), -1, CELL_WIDTH)
        if (results.matrix[:, 0] != expected[0]).any() or (cells[:, :, :2] != known[:, :2]).any():
            return "its answer has different cells"
        logits = np.ascontiguousarray(cells[:, :, 2:]).reshape(len(results), -1)
        return find_changed(Ragged.from_matrix(logits), known[:, 2:].ravel())


def name_inputs(prompts: Prompts) -> TokenizedTexts:
    """Return the sequences with every input present, because sequences of many requests share a batch."""
    blank = Ragged.from_scalars(np.zeros(len(prompts), dtype=np.int32))
    inputs = {IS_BLANK: blank, **prompts.inputs}
    return TokenizedTexts(inputs, np.zeros(len(prompts), dtype=np.bool_), {})
