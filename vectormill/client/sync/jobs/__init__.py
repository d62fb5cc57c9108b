# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""Jobs: at work, and what they made."""
