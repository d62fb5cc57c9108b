"""Load the output of a job into another store: Qdrant, LanceDB or Postgres with pgvector."""
