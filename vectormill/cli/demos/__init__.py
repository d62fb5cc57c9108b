"""The demos of all tasks but `embed`: a file for each task, and one that runs them."""
