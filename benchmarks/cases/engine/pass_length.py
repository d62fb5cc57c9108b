"""How often a mix is gone through in one pass, so that a pass is long enough to tell a rate. Measures nothing."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from benchmarks.cases.comparing import count_tokens
from benchmarks.mixes import Mix, number_copies
from benchmarks.probes.model_cost import ModelCost
from benchmarks.results.comparison import GIGA
from vectormill.models.model_card import ModelCard

# In ten seconds the start and the end of a job are a tenth of what is measured.
PASS_SECONDS: Final = 30.0
# Nobody has come nearer to the rate of a matrix product: a pass is not shorter than that.
BEST_SHARE: Final = 0.85
MOST_COPIES: Final = 30


def lengthen(mix: Mix, card: ModelCard, matrix_rates: Mapping[str, float]) -> Mix:
    """The mix as often as it takes; from the second round on each text begins with the round's number."""
    flop = ModelCost.of(card).count_flop(count_tokens(card, mix.texts))
    num_copies = plan_copies(flop, matrix_rates)
    if num_copies == 1:
        return mix
    texts = tuple(number_copies(mix.texts, num_copies))
    return replace(mix, texts=texts, description=f"{mix.description}, {num_copies} times over")


def plan_copies(flop: float, matrix_rates: Mapping[str, float]) -> int:
    """How many rounds of so many operations a pass has; `matrix_rates` are GFLOP/s by precision."""
    fastest = max(matrix_rates.values()) * GIGA * BEST_SHARE
    return min(MOST_COPIES, max(1, math.ceil(PASS_SECONDS * fastest / flop)))
