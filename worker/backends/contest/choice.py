"""Chooses the backend of an order by a contest, or by the outcome of an earlier one."""

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Final

from worker.backends.contest.candidate import Candidate
from worker.backends.contest.outcome import Outcome, decide_contest
from worker.backends.contest.outcomes import find_or_measure
from worker.backends.contest.rounds import UNKNOWN_NUM_PARAMETERS, hold_contest, make_batches
from worker.devices.detect import detect_load, detect_memory
from worker.encoder.choice import OPENVINO, TORCH
from worker.encoder.encoder import Choice, EncoderOrder

BACKENDS: Final = (OPENVINO, TORCH)
# At once: torch's copy, and in openvino's candidate, which converts, torch's, the traced and the compiled one.
NUM_COPIES: Final = 4
BYTES_PER_PARAMETER: Final = 4


def choose_by_contest(order: EncoderOrder) -> tuple[Choice, tuple[str, ...]]:
    """The backend, and a note for one that cannot run. `order.precision` is a chosen one, not "auto"."""
    load = detect_load()
    outcome = find_or_measure(order, partial(_measure, order, load), load=load)
    choice = decide_contest(outcome)
    has_fallen_back = bool(outcome.rates and outcome.losses)
    return choice, (choice.reason,) if has_fallen_back else ()


def _measure(order: EncoderOrder, load: float) -> Outcome:
    day = datetime.now(UTC).date().isoformat()
    needed = (order.card.num_parameters or UNKNOWN_NUM_PARAMETERS) * BYTES_PER_PARAMETER * NUM_COPIES
    available = detect_memory().available_bytes
    if needed > available:
        reason = f"measuring needs {needed >> 20:,} MiB of memory, and {available >> 20:,} are free"
        return Outcome(day, losses=dict.fromkeys(BACKENDS, reason), is_lasting=False)
    starts = {backend: partial(Candidate, replace(order, backend=backend)) for backend in BACKENDS}
    return replace(hold_contest(starts, make_batches(order.card), day), load=load)
