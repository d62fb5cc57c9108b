"""How large a batch may be. Knows no sequences."""

from collections.abc import Callable
from dataclasses import dataclass

# The largest cost of a batch whose longest sequence has that many tokens. Asked for every batch, so that it may be
# tuned while the engine runs.
BudgetSource = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How large a batch may be, and how much of it may be padding where the kernel pads.

    `max_batch_tokens` is the largest cost of a batch (`worker.batching.cost`) until a BudgetSource says otherwise.

    A batch pads at most `max_padding_share` of what is computed or `min_padding_tokens`, whichever is more: below that,
    one batch more would cost the device more than the padding does. All batches together pad at most
    `mean_padding_share`, with what sequences are padded when they are alone: what batches of good neighbours did not
    use, up to `max_saved_tokens`, is left to worse ones.

    An interactive batch is short, because someone waits, and others may come meanwhile: `urgent_share` of the budget.
    Bulk fills it up to `top_up_share`: a GPU needs as long for 2,000 tokens as for ten, a CPU 10 ms for 128. While
    interactive requests come, bulk batches are short, too, but never below `shortest_bulk_share`.
    """

    max_batch_tokens: int
    max_padding_share: float = 0.05
    min_padding_tokens: int = 64
    mean_padding_share: float = 0.025
    max_saved_tokens: int = 256
    urgent_share: float = 1 / 4
    top_up_share: float = 1 / 16
    shortest_bulk_share: float = 1 / 8
