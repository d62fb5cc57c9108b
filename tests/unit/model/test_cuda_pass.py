"""Which errors of a GPU end the process that holds it, told without one."""

import pytest
import torch

from worker.encoder.encoder import DeviceLost
from worker.model.cuda_pass import losing_device

ILLEGAL_ACCESS = torch.AcceleratorError(
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might"
)


@pytest.mark.parametrize(
    ("error", "stays", "expected"),
    [
        (ILLEGAL_ACCESS, True, DeviceLost),
        # As cuBLAS tells of the same.
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), True, DeviceLost),
        (torch.AcceleratorError("CUDA error: no kernel image is available"), False, torch.AcceleratorError),
        (RuntimeError("The size of tensor a must match"), False, RuntimeError),  # a batch's own fault
        # Halved, not restarted.
        (torch.OutOfMemoryError("CUDA out of memory."), True, torch.OutOfMemoryError),
        (ValueError("not of torch"), True, ValueError),
    ],
)
def test_the_device_is_lost_when_the_error_stays(
    error: Exception, stays: bool, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize() -> None:
        if stays:
            raise error

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(expected) as caught, losing_device():
        raise error
    assert type(caught.value) is expected
    if expected is DeviceLost:
        assert str(caught.value) == str(error).splitlines()[0]
