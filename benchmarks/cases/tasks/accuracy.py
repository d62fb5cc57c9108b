"""accuracy: what precision, packing and placement change in the decisions of a pair model that was trained here."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.cases.tasks.judging import JudgingWay, Scores, judge_by_engine, judge_by_transformers
from benchmarks.cases.tasks.pair_model import (
    NUM_REPORTS,
    RECIPE,
    Recipe,
    find_pair_model,
    train_pair_model,
)
from benchmarks.order import Order
from benchmarks.pair_texts import Pair, list_parts, make_pairs
from benchmarks.results.report import Report
from benchmarks.results.table import Measure, Table, tabulate
from benchmarks.results.writing import write_share
from vectormill.cli.workplace import workplace
from vectormill.domain.errors import VectormillError
from vectormill.models.model_card import ModelCard, read_model_card
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.encoder.choice import BF16, INT8
from worker.placement.strategies import FULLY_SHARDED, PIPELINE, STRATEGIES, TENSOR

NAME: Final = "accuracy"
# Two pairs each. One decision of as many is a twelfth of a point.
NUM_DOCSTRINGS: Final = 600
QUICK_DOCSTRINGS: Final = 20
QUICK_RECIPE: Final = replace(RECIPE, num_docstrings=16, num_epochs=1)

WAYS: Final = (
    JudgingWay("openvino, fp32", settings={"backend": "openvino"}),
    JudgingWay("openvino, int8 weights", INT8, {"backend": "openvino"}),
    JudgingWay("torch, fp32, padded", settings={"backend": "torch", "attention": "padded"}),
    JudgingWay("torch, fp32, packed", settings={"backend": "torch", "attention": "packed"}),
    JudgingWay("torch, bf16", BF16, {"backend": "torch", "attention": "padded"}),
    JudgingWay("torch, int8 weights", INT8, {"backend": "torch", "attention": "padded"}),
    *(
        JudgingWay(f"torch, fp32, {STRATEGIES[strategy].title} over two ranks", strategy=strategy)
        for strategy in (TENSOR, PIPELINE, FULLY_SHARDED)
    ),
)
F1_TARGET: Final = 0.003
COLUMNS: Final = ("F1", "to the reference", "decisions changed", "largest difference of a score")
NOT_YET: Final = "not yet"


@dataclass(frozen=True, slots=True)
class Judgements:
    """Probabilities [n] that a pair is the same, by each way; `failures` say why others have none."""

    is_same: NDArray[np.bool_]
    reference: NDArray[np.float64]
    by_way: Mapping[str, NDArray[np.float64]]
    failures: Mapping[str, str] = field(default_factory=dict)

    def f1(self, scores: NDArray[np.float64]) -> float:
        return find_f1(self.is_same, scores > 0.5)

    def change(self, way: str) -> float:
        """Of F1, to the reference's."""
        return self.f1(self.by_way[way]) - self.f1(self.reference)


def find_f1(truth: NDArray[np.bool_], said: NDArray[np.bool_]) -> float:
    """The harmonic mean of precision and recall; 0 where nothing was found."""
    num_right = int(np.count_nonzero(truth & said))
    num_wrong = int(np.count_nonzero(truth != said))
    return 2 * num_right / (2 * num_right + num_wrong) if num_right else 0.0


def measure(order: Order) -> Report:
    packaged = Registry({}).card(DEFAULT_MODEL, weights=True)
    recipe = QUICK_RECIPE if order.is_quick else RECIPE
    directory = find_pair_model(packaged, recipe)
    is_there = directory.is_dir()
    order.steps.begin(NAME, (0 if is_there else NUM_REPORTS) + 1 + len(WAYS))
    if not is_there:
        train_pair_model(packaged, directory, order.steps.step, recipe)
    card = read_model_card("pairs", directory)
    num_docstrings = order.items or (QUICK_DOCSTRINGS if order.is_quick else NUM_DOCSTRINGS)
    pairs = make_pairs(list_parts(is_test=True), num_docstrings)
    order.steps.step("transformers, a pair at a time")
    reference = judge_by_transformers(card, pairs)
    return make_report(card, recipe, judge_all(order, card, pairs, reference))


def judge_all(order: Order, card: ModelCard, pairs: Sequence[Pair], reference: Scores) -> Judgements:
    """By every way of ours that there is."""
    by_way: dict[str, NDArray[np.float64]] = {}
    failures: dict[str, str] = {}
    with workplace(None) as directory:
        for way in WAYS:
            order.steps.step(way.name)
            try:
                by_way[way.name] = _same(judge_by_engine(card, way, pairs, directory / "cache"))
            except VectormillError as error:
                failures[way.name] = str(error)
    return Judgements(np.array([pair.is_same for pair in pairs]), _same(reference), by_way, failures)


def _same(scores: Scores) -> NDArray[np.float64]:
    return scores[:, 1].astype(np.float64)


def make_report(card: ModelCard, recipe: Recipe, judgements: Judgements) -> Report:
    num_pairs = len(judgements.is_same)
    return Report(
        NAME,
        f"a cross-encoder of {DEFAULT_MODEL}, trained on {2 * recipe.num_docstrings:,} pairs of docstrings of other "
        f"modules than the {num_pairs:,} that it judges.",
        (to_table(judgements), tabulate(list(judge(judgements)))),
        (
            "A pair is a docstring's first sentence and what follows it, or what follows in another docstring, half of "
            "these of the same module. Same or not is decided at a probability of one half; F1 is that of the same.",
            f"The reference is transformers, fp32, a pair at a time. Pairs are cut at {card.max_tokens} tokens by all.",
            "bf16 is emulated where the processor has none, which is slow and rounds alike. Compressed weights are "
            "restored for the arithmetic.",
            *(f"{name} is {NOT_YET} there: {reason}" for name, reason in judgements.failures.items()),
        ),
    )


def to_table(judgements: Judgements) -> Table:
    title = f"{len(judgements.is_same):,} pairs, of which {judgements.is_same.sum():,} are the same"
    rows = [
        ("transformers, fp32, one at a time", write_share(judgements.f1(judgements.reference)), "", "", "")
    ]
    for way in WAYS:
        scores = judgements.by_way.get(way.name)
        if scores is None:
            rows.append((way.name, NOT_YET, "", "", ""))
            continue
        num_changed = np.count_nonzero((scores > 0.5) != (judgements.reference > 0.5))
        rows.append(
            (
                way.name,
                write_share(judgements.f1(scores)),
                f"{100 * judgements.change(way.name):+.2f} points",
                f"{num_changed:,}",
                f"{np.abs(scores - judgements.reference).max():.1e}",
            )
        )
    return Table((title, *COLUMNS), tuple(rows))


def judge(judgements: Judgements) -> Iterator[Measure]:
    largest = max(judgements.by_way, key=lambda way: abs(judgements.change(way)), default=None)
    if largest is not None:
        change = judgements.change(largest)
        yield Measure(
            f"largest change of F1 ({largest})",
            f"{100 * abs(change):.2f} points",
            f"≤ {100 * F1_TARGET:.1f} points",
            abs(change) <= F1_TARGET,
        )
