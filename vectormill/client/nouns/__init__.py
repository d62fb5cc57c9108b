"""What the client can do, one file a noun."""
