"""The console: web pages that the API renders from Postgres alone, without Redis and workers."""
