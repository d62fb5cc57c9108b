# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""The asynchronous client. `python -m tools.client` generates `sync` from it."""
