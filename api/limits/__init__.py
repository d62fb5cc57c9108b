"""How much is taken at a time, and from whom."""
