"""The formats in which vectors, scores and records are stored and written."""
