"""Queries: texts that somebody waits for, and no row in Postgres."""
