"""What an item gets: each kind of result is a class, from columns in Postgres to JSON, Parquet and loads."""
