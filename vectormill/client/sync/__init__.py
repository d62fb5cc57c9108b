# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""The client as coroutines. `sync` is made of it: `python -m tools.client`."""
