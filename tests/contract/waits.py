"""RefusesWaiting: within it, whatever would make the host wait for a GPU raises, on a CPU too, where nothing waits."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Those whose answer, or whose shape, the host has to know before it goes on.
WAITING = frozenset(
    {
        "_local_scalar_dense",  # item, int, float, bool
        "item",
        "allclose",
        "argwhere",
        "is_nonzero",
        "nonzero",
        "equal",
        "masked_select",
        "unique_dim",
        "_unique2",
        "unique_consecutive",
    }
)


class RefusesWaiting(TorchDispatchMode):
    """Raises AssertionError with the name of the operation."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        assert name not in WAITING, f"{func} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            indices = [index for index in args[1] if index is not None]
            assert all(index.dtype not in (torch.bool, torch.uint8) for index in indices), (
                f"{func} by a mask waits"
            )
        if name == "repeat_interleave":
            assert (kwargs or {}).get("output_size") is not None, f"{func} without its output's size waits"
        run: Callable[..., Any] = func
        return run(*args, **(kwargs or {}))
