"""The console: pages of this API for people, rendered here. Knows no Redis and no worker but by what Postgres tells."""
