"""Find the fastest way to run a model on a device by trying its few ways, and keep what was found."""
