"""Kinds of results that an item gets: each is a class, from columns in Postgres to JSON, Parquet and loads."""
