"""Speed: what a text and a token cost a worker, found from jobs of different lengths."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from vectormill.quotes.figure import Figure

# Texts and tokens that were encoded, and the seconds in which workers held chunks for them, added up over workers.
Measured = tuple[float, float, float]

# Shorter measurements are mostly of waiting.
LEAST_SECONDS: Final = 1.0
# A job takes at most so many times what was fitted, or as many as this share of the measured jobs did; few jobs say
# less. The rest stood still for reasons of their own, and one of them in a long time must not make a quote useless.
LEAST_FACTOR: Final = 1.25
LIKELY_SHARE: Final = 0.9
# Jobs that differ more from what was fitted tell less than the arithmetic of the model and the devices.
MOST_FACTOR: Final = 10.0
NUM_FEW: Final = 5
FEW_POWER: Final = 1.6


@dataclass(frozen=True, slots=True)
class Speed:
    """The seconds of one worker for a text and for each of its tokens, and the number of workers.

    The time of a job is expected between the `factor`-th part of what they say and `factor` times as much.
    """

    text_seconds: float
    token_seconds: float
    num_workers: int
    factor: float

    def find_seconds(self, num_texts: float, num_tokens: float) -> float:
        """Return the seconds that all workers together need."""
        return (num_texts * self.text_seconds + num_tokens * self.token_seconds) / self.num_workers

    def find_rate(self, tokens_per_text: float) -> Figure:
        """Return the tokens per second of texts of this length, which is at least one token."""
        tokens_per_text = max(1.0, tokens_per_text)
        rate = tokens_per_text / self.find_seconds(1, tokens_per_text)
        return Figure(rate, rate / self.factor, rate * self.factor)


def fit_speed(measured: Sequence[Measured], num_workers: int) -> Speed | None:
    """Fit the costs of a text and of a token by least squares of the relative errors; None without a measurement.

    Measurements whose seconds for a token are far from the median's are not fitted, but count for the interval.
    """
    rows = np.array(
        [each for each in measured if each[2] >= LEAST_SECONDS and min(each) > 0], dtype=np.float64
    )
    if not len(rows):
        return None
    # [n, 2]: times the costs it is 1 for a job that took as long as fitted
    all_shares = rows[:, :2] / rows[:, 2:]
    speeds = np.log(all_shares[:, 1])
    is_near = np.abs(speeds - np.quantile(speeds, 0.5, method="nearest")) <= math.log(MOST_FACTOR)
    shares = all_shares[is_near]
    costs = np.linalg.lstsq(shares, np.ones(len(shares)))[0]
    if len(shares) == 1 or costs.min() < 0:  # lengths that hardly differ, or chance: one of the costs is 0
        alone = shares.sum(axis=0) / (shares**2).sum(axis=0)
        errors = ((shares * alone - 1) ** 2).sum(axis=0)
        use = 1 if len(shares) == 1 else int(errors.argmin())
        costs = np.where(np.arange(2) == use, alone, 0.0)
    likely = float(np.quantile(np.abs(np.log(all_shares @ costs)), LIKELY_SHARE, method="higher"))
    factor = max(LEAST_FACTOR, math.exp(likely)) ** (FEW_POWER if len(rows) < NUM_FEW else 1)
    return Speed(float(costs[0]), float(costs[1]), num_workers, factor)
