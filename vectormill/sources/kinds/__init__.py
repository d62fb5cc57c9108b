"""One file a kind of source."""
