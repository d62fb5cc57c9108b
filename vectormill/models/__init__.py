"""The registered models, and what their files say about them."""
