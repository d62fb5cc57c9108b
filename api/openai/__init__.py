"""Interfaces of OpenAI and of others: bodies, answers and refusals in their shapes."""
