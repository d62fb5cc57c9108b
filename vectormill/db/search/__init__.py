"""Searches: conditions, rankings and plans, and what they find."""
