"""Patience: how long a batch that is not full waits for more sequences. Pure; knows no clock."""

from typing import Final

# Before the runner is out of work: a batch is taken from the pool, sent and read in 1 to 2 ms.
LEAD_SECONDS: Final = 0.003
# A chunk of 512 short texts is tokenized in 5 to 10 ms, a request of one in less than 1 ms. To let a device stand still
# for longer costs more than the batch after next, which would be fuller, could bring in again.
TOKENIZING_SECONDS: Final = 0.005


def find_hold_end(free_at: float, held_since: float, *, is_tokenizing: bool) -> float:
    """The moment at which a batch is sent though it is not full.

    `free_at` is when the runner has nothing left to do, foreseen or past. Until shortly before, waiting costs nothing;
    a little longer pays if texts are being tokenized, which are likely to fill it.
    """
    if is_tokenizing:
        return max(free_at, held_since) + TOKENIZING_SECONDS
    return free_at - LEAD_SECONDS
