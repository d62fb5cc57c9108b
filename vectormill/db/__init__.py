"""Where things are kept: Postgres, through SQLAlchemy Core and SQL written whole."""
