"""Postgres (with pgvector) and Valkey of our own, from PyPI wheels, for one machine and for tests."""
