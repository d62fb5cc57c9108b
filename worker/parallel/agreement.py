"""Find out whether packed attention is right on all ranks of a model; all reach the same decision.

Packed attention is compared with padding on all ranks at once before any rank uses it. Ranks that share a
model run every forward pass together: one that packs next to one that pads would wait for hidden states of
another shape, or add up values of different tokens; and one that leaves a pass midway because its kernel
raised leaves the others waiting. So a kernel that raises returns zeros, each rank completes the whole probe,
and only then do all exchange what they found.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from vectormill.domain.errors import ModelError
from worker.batching.batch import Batch
from worker.model.forms import Form
from worker.model.packed import Kernel, find_deviation, first_line, make_attention
from worker.model.runtime import transformers

PROBED: Final = "vectormill_probed"

# Returns the hidden states [tokens, hidden size] that this rank ends up with for a probe; a stage returns its
# own.
Compute = Callable[[Form, Batch], Tensor]


class CapturingKernel:
    """A kernel that stores its first exception in `error` and returns zeros instead of raising it."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.error: Exception | None = None

    def __call__(self, query: Tensor, *arguments: Any) -> Tensor:
        try:
            return self._kernel(query, *arguments)
        except Exception as error:  # noqa: BLE001 - a kernel that is missing or refuses a shape raises anything
            self.error = self.error or error
            return torch.zeros_like(query)


def find_flaw(
    transformer: nn.Module,
    padded: Form,
    packed: Form,
    kernel: Kernel,
    probes: Sequence[Batch],
    compute: Compute,
    ask_all: Callable[[str], str],
    *,
    has_last_states: bool,
) -> str:
    """Return what is wrong with packing, to complete a "because"; empty if nothing. The same on all ranks.

    The ranks first exchange whether kernels failed through `ask_all`, because the result of a failed kernel
    is missing on other ranks too. `has_last_states` is set if this rank ends up with the model's last hidden
    states, which depend on those of earlier stages. Raises ModelError if anything but the kernel ended the
    pass midway: the other ranks are then left waiting.
    """
    capturing = CapturingKernel(kernel)
    transformers.AttentionInterface.register(PROBED, make_attention(capturing))
    try:
        expected = [compute(padded, probe) for probe in probes]
        with attending(transformer, PROBED):
            found = [compute(packed, probe) for probe in probes]
        if found[0].is_cuda:
            torch.cuda.synchronize()  # a kernel's error is reported only by the next synchronization
    except Exception as error:
        raise ModelError(
            f"Packed attention broke a forward pass of this rank ({first_line(capturing.error or error)}) while the "
            "others wait for it; use padded attention."
        ) from error
    failed = "" if capturing.error is None else f"packed attention failed: {first_line(capturing.error)}"
    deviation = find_deviation(expected, found) if has_last_states else ""
    return ask_all(failed) or ask_all(
        f"packed attention deviates from padding: {deviation}" if deviation else ""
    )


@contextmanager
def attending(transformer: nn.Module, kernel: str) -> Iterator[None]:
    """Make the transformer attend with this kernel during the block."""
    before = str(transformer.config._attn_implementation)
    set_attention(transformer, kernel)
    try:
        yield
    finally:
        set_attention(transformer, before)


def set_attention(transformer: nn.Module, kernel: str) -> None:
    """Set the attention kernel of every layer; transformers' own function misses the layers of a stage."""
    for module in transformer.modules():
        config: Any = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = kernel
