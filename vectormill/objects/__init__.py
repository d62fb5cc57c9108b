"""Object storage: read texts from objects by reference, and write results as Parquet parts with a manifest."""
