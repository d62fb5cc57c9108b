"""API keys: who may call, and what. The table, its SQL, the types, and the keys that an API process knows."""
