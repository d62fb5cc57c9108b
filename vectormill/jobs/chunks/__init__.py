"""Chunks of jobs: sized, dispatched, claimed, committed, rescued."""
