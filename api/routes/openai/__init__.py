"""The routes that clients of other APIs ask: OpenAI's above all."""
