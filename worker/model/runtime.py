"""transformers as a process that only runs models wants it: without torch's compiler, and without what training needs.

Adds nothing to it. The import of torch._dynamo is a quarter of what a process of torch takes to be there.
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


class CompilerMarks(ModuleType):
    """Stands where torch's compiler would: whatever it marks stays as it is."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):  # asked by Python itself, which wants no mark
            raise AttributeError(name)
        return mark


def mark(function: Callable[..., Any] | None = None, *options: object, **more: object) -> Any:
    """Return a decorator, with or without options."""
    return function if function is not None else mark


class LateModule(ModuleType):
    """Has functions and classes that are the real ones once they are called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: getattr(import_module(self.__name__), name)(*args, **options)


@contextmanager
def standing_in(*modules: ModuleType) -> Iterator[None]:
    """Let imports of these names find stand-ins during the block. Modules that are loaded already stay."""
    ours = [module for module in modules if module.__name__ not in sys.modules]
    sys.modules.update({module.__name__: module for module in ours})
    try:
        yield
    finally:
        for module in ours:
            del sys.modules[module.__name__]
        # An import leaves the module at its parent too, where it would be found before the real one.
        if isinstance(torch.__dict__.get("_dynamo"), CompilerMarks):
            del torch._dynamo


with standing_in(CompilerMarks(COMPILER), LateModule(CONTEXTS), LateModule(SOLVERS)):
    import transformers
    import transformers.masking_utils
    import transformers.modeling_utils

__all__ = ["transformers"]
