"""Measures of a generation's rows, for checks and canaries; the indexer decides what they mean."""
