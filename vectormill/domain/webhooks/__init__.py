"""Webhooks, deliveries, and what an attempt came to."""
