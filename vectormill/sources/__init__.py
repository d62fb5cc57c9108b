"""Sources: where a collection's texts come from, including pushed rows and followed tables."""
