"""Tools for tests of torch's compiler: a clean state, and a skip mark for machines without a C++ compiler."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.compiler import set_stance

# torch's own compiler raises this warning about itself.
IGNORES_TORCHS_WARNING = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def find_obstacle() -> str:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return f"torch finds no C++ compiler here: {error}"
    return ""


OBSTACLE = find_obstacle()
# Without a C++ compiler nothing is compiled and the switch is off; other tests check that.
NEEDS_COMPILER = pytest.mark.skipif(bool(OBSTACLE), reason=OBSTACLE or "there is one")


@contextmanager
def fresh_compiler(directory: Path) -> Iterator[None]:
    """Reset torch's compiler before and after the block; compiled code is kept in the directory."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    configs = (
        (torch._dynamo.config, "recompile_limit"),
        (torch._inductor.config, "compile_threads"),
        (torch.fx.experimental._config, "use_duck_shape"),
    )
    before = [getattr(config, name) for config, name in configs]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory))
        yield
    set_stance("default")
    torch._dynamo.reset()
    for (config, name), value in zip(configs, before, strict=True):
        setattr(config, name, value)


def count_graphs() -> int:
    """Return the number of graphs that torch compiled since this process began or the counters were cleared."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
