"""Tasks: what a job wants of its texts, and what an item of it is."""
