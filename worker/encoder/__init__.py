"""What an encoder is, and which one a device gets. Names no framework."""
