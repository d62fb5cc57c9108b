"""The forms in which vectors, scores and records are kept and written."""
