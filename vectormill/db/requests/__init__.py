"""What clients of the OpenAI-compatible interface keep here: files of requests, and batches of them."""
