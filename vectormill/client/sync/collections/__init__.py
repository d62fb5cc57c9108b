# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""Collections, and what fills them, searches them and keeps them fresh."""
