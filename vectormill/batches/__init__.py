"""Request batches: a file of requests becomes a job, and its results a file of answers."""
