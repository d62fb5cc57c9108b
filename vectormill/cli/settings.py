"""The environment of a command, which every process that it starts inherits. Imports nothing heavy."""

import os


def ignore_project() -> None:
    """Let this process and its children take nothing from the project in whose folder the command runs.

    A Python child would import the modules of the current folder before ours, and before the standard library's. Celery
    would use that project's broker in place of ours, and load its configuration.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    for name in [name for name in os.environ if name.startswith("CELERY_")]:
        del os.environ[name]
