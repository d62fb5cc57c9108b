"""One model on several devices, which all ranks divide, fill and run together."""
