"""The asynchronous client. `python -m tools.client` generates `sync` from it."""
