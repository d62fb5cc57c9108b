"""Overviews: what a page for people shows of many things at once. Reads, and locks nothing."""
