"""The environment as a whole, for children that shall see what we see. What is in it is read in vectormill.settings."""

import os


def read_environment() -> dict[str, str]:
    """A copy of every variable of this process."""
    return dict(os.environ)
