"""The command line, which starts processes and calls the API. Imports nothing heavy before a command runs."""

from vectormill.cli.app import main

__all__ = ["main"]
