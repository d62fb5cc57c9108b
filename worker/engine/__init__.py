"""The encoding engine: it turns texts into vectors and keeps the requests and batches in flight."""
