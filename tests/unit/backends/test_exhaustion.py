"""Which errors of the frameworks mean that memory was short."""

import numpy as np
import pytest

from worker.encoder.memory import is_out_of_memory


class OutOfMemoryError(RuntimeError):
    """As torch's own: recognized by its name, because torch is not imported."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("Exception from src/inference/src/cpp/infer_request.cpp:223:\nstd::bad_alloc"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("could not create a primitive"), True),  # oneDNN in torch, where bf16 has kernels made
        (RuntimeError("could not create a memory object"), True),
        (
            RuntimeError(
                "Exception from src/plugins/intel_cpu/src/node.cpp:823:\n[CPU] MVN node can't alloc"
            ),
            True,
        ),
        (
            RuntimeError("could not create a primitive descriptor for the matmul primitive"),
            False,
        ),  # no such kernel
        (MemoryError(), True),
        (RuntimeError("shape '[2, 3]' is invalid for input of size 5"), False),
        (
            ValueError("a text about a machine that ran out of memory"),
            False,
        ),  # words of the input, not of the framework
    ],
)
def test_an_error_that_means_too_little_memory_is_told_from_all_others(
    error: Exception, expected: bool
) -> None:
    assert is_out_of_memory(error) is expected


def test_an_array_that_numpy_cannot_allocate_is_out_of_memory() -> None:
    with pytest.raises(MemoryError) as caught:
        np.empty(1 << 50)
    assert is_out_of_memory(caught.value)


def test_the_consequence_of_an_out_of_memory_is_one_too() -> None:
    error = RuntimeError("the graph could not be captured")
    error.__cause__ = OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(error)
