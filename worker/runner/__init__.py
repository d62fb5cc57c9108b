"""Runners: the processes that hold encoders, and the messages exchanged with them."""
