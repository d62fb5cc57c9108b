"""Webhooks on their way: where they may go, and how they are signed."""
