"""Collections: their generations, rows, kinds and indexes. Tables, SQL and types."""
