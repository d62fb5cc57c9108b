"""The registered models, and what their files say of them."""
