"""The processes that hold encoders, and what is said to them."""
