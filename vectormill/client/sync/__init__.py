# Made of the same file in `aio` by `python -m tests.architecture.derived`: change that one.
"""The client as coroutines. `sync` is made of it: `python -m tests.architecture.derived`."""
