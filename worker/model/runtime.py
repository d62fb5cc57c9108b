"""Import transformers without torch's compiler and without training code, which a model process does not use.

This saves 2.7 of 8.2 seconds of CPU time at the start of each model process, and 70 MB of its memory.
transformers needs the compiler for decorators on generation functions, and for one context used with masks of
another form. Nothing that runs here is decorated so; `worker/model/switching.py` imports the real compiler
later. The table of training losses imports scipy and, where they are installed, PIL and torchvision, which
needs the real compiler.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch

COMPILER: Final = "torch._dynamo"
CONTEXTS: Final = "torch._dynamo._trace_wrapped_higher_order_op"
LOSSES: Final = "transformers.loss.loss_utils"


class StubCompiler(ModuleType):
    """A stub of torch's compiler, whose decorators return what they decorate."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):  # Python's own look-ups, which expect no decorator
            raise AttributeError(name)
        return mark


def mark(function: Callable[..., Any] | None = None, *options: object, **more: object) -> Any:
    """Return the function unchanged, as a decorator with or without options."""
    return function if function is not None else mark


class LazyModule(ModuleType):
    """A module that is imported when one of its functions or classes is first called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: getattr(import_module(self.__name__), name)(*args, **options)


class NoLosses(ModuleType):
    """A table of training losses that has only the default one, which torch's tracer looks up, as None."""

    LOSS_MAPPING: Final[Mapping[str, object]] = {"ForCausalLM": None}


@contextmanager
def stub_modules(*modules: ModuleType) -> Iterator[None]:
    """Make imports of these names find the given modules during the block.

    Loaded modules are not replaced.
    """
    ours = [module for module in modules if module.__name__ not in sys.modules]
    sys.modules.update({module.__name__: module for module in ours})
    try:
        yield
    finally:
        for module in ours:
            del sys.modules[module.__name__]
        # An import also sets the module as an attribute of its parent, which would hide the real one.
        if isinstance(torch.__dict__.get("_dynamo"), StubCompiler):
            del torch._dynamo


with stub_modules(StubCompiler(COMPILER), LazyModule(CONTEXTS), NoLosses(LOSSES)):
    import transformers
    import transformers.masking_utils
    import transformers.modeling_utils

__all__ = ["transformers"]
