"""Bodies of files and batches, in OpenAI's shape."""
