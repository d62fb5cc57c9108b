"""RefusesWaiting: within it, whatever would make the host wait for a GPU raises, on a CPU too, where nothing waits.

A copy from the host waits too, unless it is of pinned memory and asked not to. It is seen where the model is on the
meta device, which the host's own tensors are not; `torch.tensor` with a device of its own is not seen.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
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


# Those that may bring a tensor of the host to the device.
COPYING = frozenset({"_to_copy", "to", "type_as", "copy_"})


class RefusesWaiting(TorchDispatchMode):
    """Raises AssertionError with the name of the operation.

    What the host asks of its own tensors is no wait, which can be told where the model is on the meta `device`.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        is_there = any(
            isinstance(each, Tensor) and each.device.type in (self._device, "meta") for each in args
        )
        assert name not in WAITING or not is_there, f"{func} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            indices = [index for index in args[1] if index is not None]
            assert all(index.dtype not in (torch.bool, torch.uint8) for index in indices), (
                f"{func} by a mask waits"
            )
            assert all(index.device == args[0].device for index in indices), (
                f"{func} by the host's numbers waits"
            )
        if name == "repeat_interleave":
            assert (kwargs or {}).get("output_size") is not None, f"{func} without its output's size waits"
        run: Callable[..., Any] = func
        result = run(*args, **(kwargs or {}))
        if name in COPYING and result.device.type != "cpu":
            source = args[1] if name == "copy_" else args[0]
            is_copied = source.device.type == "cpu"
            may_go_on = (kwargs or {}).get("non_blocking", False)
            assert not is_copied or may_go_on, f"{func} copies from the host and waits for the device"
        return result
