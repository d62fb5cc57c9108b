"""Quotes: what a job or a re-index will take, computed from a sample of its texts before it is started."""
