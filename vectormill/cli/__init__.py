"""The command line: starts processes and speaks HTTP. Imports nothing heavy until a command runs."""

from vectormill.cli.app import main

__all__ = ["main"]
