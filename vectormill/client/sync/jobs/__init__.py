# Made of the same file in `aio` by `python -m tests.architecture.derived`: change that one.
"""Jobs: at work, and what they made."""
