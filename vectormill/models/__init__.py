"""Which models there are, and what their files say of them."""
