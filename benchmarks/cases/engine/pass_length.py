"""How often a mix is gone through in one pass, so that a pass is long enough to tell a rate, and how long all of them
take. Measures nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from benchmarks.cases.comparing import count_tokens, find_precision
from benchmarks.mixes import Mix, number_copies
from benchmarks.probes.model_cost import ModelCost
from benchmarks.results.comparison import GIGA
from benchmarks.systems.line_up import BOUNDS, OURS
from benchmarks.systems.peers.serving import WARM_UP_SHARE
from benchmarks.systems.turns import Record
from vectormill.models.model_card import ModelCard

# In ten seconds the start and the end of a job are a tenth of what is measured.
PASS_SECONDS: Final = 30.0
# Of the rate of a matrix product: what our engine is to reach, and what the peers were seen to.
BEST_SHARE: Final = 0.75
PEERS_SHARE: Final = 0.4
MOST_COPIES: Final = 30
# To start a process and load the model; a peer that is installed or exported first takes minutes.
START_SECONDS: Final = 15.0


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


def estimate_seconds(
    mixes: Sequence[Mix],
    card: ModelCard,
    systems: Sequence[str],
    repeat: int,
    matrix_rates: Mapping[str, float],
) -> float:
    """What starts, warming up and all passes are likely to take together; a forecast for whoever waits."""
    cost = ModelCost.of(card)
    flop = sum(cost.count_flop(count_tokens(card, mix.texts)) for mix in mixes)
    return sum(
        START_SECONDS + flop * count_rounds(repeat) / foresee_rate(name, matrix_rates) for name in systems
    )


def count_rounds(repeat: int) -> float:
    """How often a system goes through a mix, warming up with a part of it."""
    return repeat + 1 / WARM_UP_SHARE


def foresee_rate(system: str, matrix_rates: Mapping[str, float]) -> float:
    """FLOP/s."""
    share = BEST_SHARE if system in (*OURS, *BOUNDS) else PEERS_SHARE
    precision = find_precision(system, Record(system))
    return share * GIGA * matrix_rates.get(precision, min(matrix_rates.values()))
