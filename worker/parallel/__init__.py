"""One model on several devices: divided, filled and run by all ranks together."""
