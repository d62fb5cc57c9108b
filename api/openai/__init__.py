"""What clients of OpenAI's API and of others send and read, in their shapes, refusals with them."""
