"""A worker's report of itself, and how others read it."""
