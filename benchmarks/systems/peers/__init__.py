"""The systems that we are compared with."""
