"""The indexer: carries out runs, which keep collections in step with their sources. Needs Postgres only; no torch."""
