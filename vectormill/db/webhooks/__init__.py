"""Statements about webhooks and their deliveries."""
