"""Access to Postgres, through SQLAlchemy Core and SQL written whole."""
