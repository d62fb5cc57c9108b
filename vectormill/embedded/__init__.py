"""Embedded Postgres (with pgvector) and Valkey, from PyPI wheels, for a single machine and for tests."""
