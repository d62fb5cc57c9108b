"""Jobs and their chunks: tables, SQL and types to submit, control, await, export and delete jobs."""
