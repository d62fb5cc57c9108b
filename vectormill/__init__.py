"""Vectormill: text in, vectors out, in bulk. What API, scheduler, worker and command line share; torch-free."""

__version__ = "0.1.0"
