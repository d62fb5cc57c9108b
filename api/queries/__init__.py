"""Texts of searches that become vectors, by messages to workers."""
