"""API keys and their scopes: the table, its SQL, the types, and the cache in each API process."""
