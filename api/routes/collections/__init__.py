"""Routes of collections and what is in them."""
