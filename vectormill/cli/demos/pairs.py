"""The demo of `score`: the first sentence of a docstring beside what follows it, and beside what follows another one.

A model that tells texts apart scores a sentence higher with its own rest; random weights do so every other time.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vectormill.cli.demos.task_demo import DemoModel, DemoReport, Json, Listing, Results, TaskDemo
from vectormill.domain.tasks.task import JUDGE

if TYPE_CHECKING:
    from vectormill.client import Client
    from vectormill.files.ndjson import ItemJson

OWN: Final = "own"
OTHER: Final = "other"
NUM_PAIRS: Final = 2000
NUM_SHOWN: Final = 4
SHOWN_CHARS: Final = 44


def choose_weights(directory: Path) -> DemoModel:
    """Return the packaged model: real weights, although of no classifier."""
    from vectormill.models.registry import DEFAULT_MODEL

    return DemoModel(
        DEFAULT_MODEL,
        "the default",
        f"The weights are the real ones of {DEFAULT_MODEL}, which embeds: a score is the cosine of two vectors; "
        "--model takes the directory of a classifier, which reads both texts at once.",
    )


def list_pairs(num_pairs: int) -> "list[ItemJson]":
    """Return two for each docstring: with its own rest, and with that of a docstring from the other half of the
    library.
    """
    from vectormill.corpus import read_docstrings, split_first_sentence, take_evenly

    parts = [
        (docstring.key, sentence, rest)
        for docstring in read_docstrings()
        for sentence, rest in [split_first_sentence(docstring.text)]
        if sentence and rest
    ]
    chosen = take_evenly(parts, num_pairs // 2)
    pairs: list[ItemJson] = []
    for number, (key, sentence, rest) in enumerate(chosen):
        other = chosen[(number + len(chosen) // 2) % len(chosen)][2]
        pairs.append({"key": f"{key}/{OWN}", "text": sentence, "text_pair": rest})
        pairs.append({"key": f"{key}/{OTHER}", "text": sentence, "text_pair": other})
    return pairs


def read_scores(client: "Client", job_id: str) -> Iterator[Json]:
    return client.scores(job_id, partial=True)


def is_sound(result: Json) -> bool:
    return math.isfinite(result["score"])


def find(pairs: Sequence["ItemJson"], results: Results) -> DemoReport:
    """Tell how well the scores separate a sentence's own continuation from that of another sentence."""
    scores = {key: float(result["score"]) for key, result in results.items()}
    by_kind = {kind: _pick(pairs, scores, kind) for kind in (OWN, OTHER)}
    both = [(own, by_kind[OTHER][key]) for key, own in by_kind[OWN].items() if key in by_kind[OTHER]]
    share = sum(own > other for own, other in both) / len(both) if both else 0.0
    medians = {kind: statistics.median(found.values()) if found else None for kind, found in by_kind.items()}
    rows = [
        ("sentences with their own rest", f"{len(by_kind[OWN]):,}", _write(medians[OWN])),
        ("with another's rest", f"{len(by_kind[OTHER]):,}", _write(medians[OTHER])),
        ("own rest scored higher", f"{share:.1%}", ""),
    ]
    shown = [pair for pair in pairs if pair["key"] in scores][: 2 * NUM_SHOWN]
    return DemoReport(
        (
            Listing("What the scores tell apart", ("", "pairs", "median score"), rows),
            Listing(
                "Some pairs",
                ("score", "text", "text_pair"),
                [
                    (_write(scores[pair["key"]]), _shorten(pair["text"]), _shorten(pair["text_pair"]))
                    for pair in shown
                ],
            ),
        ),
        {"median_scores": medians, "own_scored_higher": share},
    )


def _pick(pairs: Sequence["ItemJson"], scores: dict[str, float], kind: str) -> dict[str, float]:
    """Scores of one kind of pair, by the docstring's name."""
    keys = [pair["key"] for pair in pairs if pair["key"].endswith(f"/{kind}")]
    return {key.removesuffix(f"/{kind}"): scores[key] for key in keys if key in scores}


def _write(score: float | None) -> str:
    return "-" if score is None else f"{score:.3f}"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS - 1]}…"


DEMO: Final = TaskDemo(
    task=JUDGE,
    noun="pair",
    num_items=NUM_PAIRS,
    choose_weights=choose_weights,
    list_items=list_pairs,
    read_results=read_scores,
    is_sound=is_sound,
    find=find,
)
