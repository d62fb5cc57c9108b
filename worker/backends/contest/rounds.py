"""Rounds: candidates encode the same batches in turn. Keeps nothing and decides nothing."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from vectormill.models.model_card import ModelCard
from worker.backends.contest.candidate import Candidate, CandidateLost
from worker.backends.contest.outcome import Outcome
from worker.batching.token_batch import TokenBatch

NUM_ROUNDS: Final = 3
ROUNDS_SECONDS: Final = 10.0  # a crowded machine or a large model gets fewer rounds, but never none
LOAD_TIMEOUT_SECONDS: Final = 300.0  # the first start converts
PASS_TIMEOUT_SECONDS: Final = 60.0
# Shortest and longest sequence of a batch: titles; paragraphs. Like lengths together, as in a job.
SHAPES: Final = ((8, 24), (192, 256))
# Tokens of a batch: as many as workers take on a CPU, and for large models so few that a pass takes about a second at
# 200 GFLOP/s (2 FLOP for each parameter and token).
MOST_TOKENS: Final = 1024
FEWEST_TOKENS: Final = 64
TOKENS_TIMES_PARAMETERS: Final = 1e11
UNKNOWN_NUM_PARAMETERS: Final = 100_000_000


def hold_contest(
    starts: Mapping[str, Callable[[], Candidate]], batches: Sequence[TokenBatch], day: str
) -> Outcome:
    """Loads every candidate, then lets them encode in turn, so that what disturbs the machine disturbs all alike.

    The first pass over a shape is not counted; of the others the best is, since all that disturbs makes slower.
    """
    started: list[Candidate] = []
    running: dict[str, Candidate] = {}
    losses: dict[str, CandidateLost] = {}
    seconds: dict[str, float] = dict.fromkeys(starts, 0.0)
    try:
        for backend, start in starts.items():
            running[backend] = start()
            started.append(running[backend])
        measure_each(
            partial(Candidate.wait_until_loaded, timeout_seconds=LOAD_TIMEOUT_SECONDS), running, losses
        )
        deadline = time.monotonic() + ROUNDS_SECONDS
        for batch in batches:
            measure = partial(Candidate.measure_seconds, batch=batch, timeout_seconds=PASS_TIMEOUT_SECONDS)
            rounds = [measure_each(measure, running, losses) for _ in range(2)]
            while len(rounds) <= NUM_ROUNDS and time.monotonic() < deadline:
                rounds.append(measure_each(measure, running, losses))
            for backend in running:
                seconds[backend] += min(measured[backend] for measured in rounds[1:])
    finally:
        for candidate in started:
            candidate.stop()
    num_tokens = sum(batch.num_tokens for batch in batches)
    return Outcome(
        day=day,
        rates={backend: num_tokens / seconds[backend] for backend in running},
        losses={backend: str(loss) for backend, loss in losses.items()},
        is_lasting=bool(running) and all(loss.is_lasting for loss in losses.values()),
    )


def measure_each(
    measure: Callable[[Candidate], float], running: dict[str, Candidate], losses: dict[str, CandidateLost]
) -> dict[str, float]:
    """What each candidate measured. One that is lost goes from `running` to `losses`."""
    measured = {}
    for backend, candidate in list(running.items()):
        try:
            measured[backend] = measure(candidate)
        except CandidateLost as loss:
            losses[backend] = loss
            del running[backend]
    return measured


def make_batches(card: ModelCard) -> tuple[TokenBatch, ...]:
    """One batch of each shape, the same for every backend and at every start."""
    random = np.random.default_rng(0)
    num_ids = find_vocabulary_size(card)
    num_tokens = TOKENS_TIMES_PARAMETERS / (card.num_parameters or UNKNOWN_NUM_PARAMETERS)
    num_tokens = max(FEWEST_TOKENS, min(MOST_TOKENS, int(num_tokens)))
    batches = []
    for bounds in SHAPES:
        shortest, longest = (min(bound, card.max_tokens, num_tokens) for bound in bounds)
        num_sequences = max(1, num_tokens * 2 // (shortest + longest))
        lengths = random.integers(shortest, longest, num_sequences, endpoint=True)
        rows = [random.integers(0, num_ids, length, dtype=np.int32) for length in lengths]
        batches.append(TokenBatch.from_ids(rows))
    return tuple(batches)


def find_vocabulary_size(card: ModelCard) -> int:
    """Token ids below it have a row in the model's table."""
    config = json.loads((card.path / "config.json").read_text(encoding="utf-8"))
    return int(config.get("text_config", config).get("vocab_size", 1))
