"""Routes compatible with OpenAI, text-embeddings-inference and Cohere: bodies, answers and errors."""
