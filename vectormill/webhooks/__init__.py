"""Webhooks, which notify receivers when jobs and runs end: tables, SQL, types, bodies and sending."""
