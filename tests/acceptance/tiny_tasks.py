"""Tiny models of the other tasks, a classifier of pairs and an extractor, with items and expected results.

tests/acceptance/tiny.py does the same for vectors. Expected results are computed without our engine: by
transformers, and by the extractor's network, one text at a time.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.acceptance import tiny
from vectormill.files.ndjson import ItemJson

JUDGE_MODEL: Final = "tiny-judge"
EXTRACT_MODEL: Final = "tiny-rex"
# Another batch sums in another order.
TOLERANCE: Final = 1e-3
# A logit nearer to 0 than this may change its sign in another batch.
MARGIN: Final = 3e-4
NUM_PAIRS: Final = 200  # distinct pairs; further items repeat them under other keys, some chunks apart
NUM_TEXTS: Final = 24
_TEXT_CHARS: Final = (8, 20)
# The schema has one level: a model of random weights finds dozens of spans, and each would cause prompts of
# the next level.
SCHEMA: Final[dict[str, Any]] = {"人物": None, "地点": None, "机构": None}


def write_models(directory: Path) -> dict[str, str]:
    """Write the classifier; return the settings that make both models known to every process."""
    from tests.classifiers import write_classifier  # imported here because the module brings torch
    from tests.rexuninlu import GOLDEN

    judge = write_classifier(directory / JUDGE_MODEL, "bert", num_labels=2)
    paths = {JUDGE_MODEL: judge, EXTRACT_MODEL: GOLDEN / "model"}
    return tiny.make_environment(directory, paths) | {"VECTORMILL_WORKER_DEVICES": "cpu:0"}


@cache
def pairs() -> list[tuple[str, str]]:
    texts = tiny.texts()
    return [(texts[2 * number], texts[2 * number + 1]) for number in range(NUM_PAIRS)]


@cache
def read_extractor() -> tuple[str, list[str], list[Any]]:
    """Return the schema as JSON, texts, and the records of each text.

    Only texts are chosen whose records do not change by rounding.
    """
    import torch

    from tests.rexuninlu import by_network, drive, find_case, load, load_tokenizer
    from worker.tasks.extract.extraction import Extraction

    torch.set_num_threads(1)  # products are so tiny that synchronizing threads takes longer
    dice = random.Random(5)
    letters = "".join(sorted(set(find_case("ee_sport")["text"])))
    texts: list[str] = []
    expected: list[Any] = []
    while len(texts) < NUM_TEXTS:
        text = "".join(dice.choices(letters, k=dice.randint(*_TEXT_CHARS)))
        answers = []
        for shift in (0.0, MARGIN, -MARGIN):
            extraction = Extraction(load_tokenizer("model"), SCHEMA, [text])
            drive(extraction, by_network(Shifted(load("model"), shift)))  # type: ignore[arg-type]
            answers.append(extraction.finish()[0])
        if answers[0] == answers[1] == answers[2]:
            texts.append(text)
            expected.append(answers[0])
    return json.dumps(SCHEMA, ensure_ascii=False), texts, expected


@dataclass(frozen=True)
class Shifted:
    """A network whose logits are all raised by `shift`."""

    network: Any
    shift: float

    def __call__(self, **inputs: Any) -> Any:
        return self.network(**inputs) + self.shift


def pair_items(count: int) -> list[ItemJson]:
    found: list[Any] = [
        {"key": f"p{number}", "text": first, "text_pair": second}
        for number, (first, second) in ((number, pairs()[number % NUM_PAIRS]) for number in range(count))
    ]
    return found


def text_items(count: int) -> list[ItemJson]:
    _, texts, _ = read_extractor()
    return [{"key": f"t{number}", "text": texts[number % NUM_TEXTS]} for number in range(count)]


def find_wrong_scores(directory: Path, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the keys, in the order of submission, whose score differs from that of their pair."""
    expected = _probabilities(directory)
    return [
        f"{row['key']}: {row['score']}"
        for number, row in enumerate(rows)
        if row["key"] != f"p{number}" or not abs(row["score"] - expected[number % NUM_PAIRS]) < TOLERANCE
    ]


def find_wrong_records(rows: Sequence[dict[str, Any]]) -> list[str]:
    _, _, expected = read_extractor()
    return [
        f"{row['key']}: {row['output']}"
        for number, row in enumerate(rows)
        if row["key"] != f"t{number}" or row["output"] != expected[number % NUM_TEXTS]
    ]


@cache
def _probabilities(directory: Path) -> list[float]:
    from tests.classifiers import reference_logits

    logits = reference_logits(directory / JUDGE_MODEL, pairs()).astype(np.float64)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    found: list[float] = (powers[:, 1] / powers.sum(axis=1)).tolist()
    return found
