"""Jobs, chunks and items: their states and what changes them."""
