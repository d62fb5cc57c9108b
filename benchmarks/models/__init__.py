"""The models that are measured, as directories that every system can load."""
