"""Collections with their generations, rows, kinds and indexes: tables, SQL and types."""
