"""Access to Postgres with SQLAlchemy Core and handwritten SQL."""
