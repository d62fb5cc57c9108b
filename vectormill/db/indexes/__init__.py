"""Vector indexes: which are there, which are wanted, and how one is built."""
