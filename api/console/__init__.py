"""The console: web pages that the API renders from what Postgres knows. It needs no Redis and asks no worker."""
