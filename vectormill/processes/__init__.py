"""Processes that are started, watched, logged and ended safely."""
