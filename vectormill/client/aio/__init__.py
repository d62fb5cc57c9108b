"""The client as coroutines. `sync` is made of it: `python -m tools.client`."""
