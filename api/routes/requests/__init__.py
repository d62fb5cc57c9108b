"""Files of requests and batches of them, over HTTP."""
