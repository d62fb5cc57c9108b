"""Progress views for a person who waits."""
