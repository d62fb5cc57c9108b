"""Limits on what an API process takes at a time, and from whom."""
