"""A chunk, from its message to its commit."""
