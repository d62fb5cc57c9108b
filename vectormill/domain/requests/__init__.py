"""Files of requests, and batches of them, as clients of OpenAI's interface know them."""
