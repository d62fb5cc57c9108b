"""Lines of request files: read into items, and written from what came of them."""
