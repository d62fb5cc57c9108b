"""Rows: every source of texts is decoded here, once for each format, and its values become items by one table."""
