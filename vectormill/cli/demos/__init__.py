"""What `vectormill demo` shows of each task but `embed`: a file a task, and one that runs them."""
