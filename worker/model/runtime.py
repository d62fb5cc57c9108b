"""Import transformers without torch's compiler and without what training needs, which a model process does not use.

Saves 2.7 of 8.2 seconds of processor time at the start of each model process, and 70 MB of its memory.
transformers wants it for marks on functions of generation, and for one context that masks of another form enter.
Nothing that runs here wears such a mark; who compiles (`worker/model/compilation.py`) imports the real one,
later. scipy is wanted by the losses of object detection.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch

COMPILER: Final = "torch._dynamo"
CONTEXTS: Final = "torch._dynamo._trace_wrapped_higher_order_op"
SOLVERS: Final = "scipy.optimize"


class StubCompiler(ModuleType):
    """A stub of torch's compiler, whose decorators return what they decorate."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):  # asked by Python itself, which wants no mark
            raise AttributeError(name)
        return mark


def mark(function: Callable[..., Any] | None = None, *options: object, **more: object) -> Any:
    """Return a decorator, with or without options."""
    return function if function is not None else mark


class LazyModule(ModuleType):
    """A module that is imported when one of its functions or classes is first called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: getattr(import_module(self.__name__), name)(*args, **options)


@contextmanager
def stub_modules(*modules: ModuleType) -> Iterator[None]:
    """Let imports of these names find the given modules during the block. Modules that are loaded already stay."""
    ours = [module for module in modules if module.__name__ not in sys.modules]
    sys.modules.update({module.__name__: module for module in ours})
    try:
        yield
    finally:
        for module in ours:
            del sys.modules[module.__name__]
        # An import leaves the module at its parent too, where it would be found before the real one.
        if isinstance(torch.__dict__.get("_dynamo"), StubCompiler):
            del torch._dynamo


with stub_modules(StubCompiler(COMPILER), LazyModule(CONTEXTS), LazyModule(SOLVERS)):
    import transformers
    import transformers.masking_utils
    import transformers.modeling_utils

__all__ = ["transformers"]
