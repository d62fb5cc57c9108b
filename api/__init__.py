"""The HTTP interface: submission, status, results, search. Never imports torch, the worker or the scheduler."""
