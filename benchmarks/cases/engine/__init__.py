"""Cases without a database: the engine, its shapes and placements."""
