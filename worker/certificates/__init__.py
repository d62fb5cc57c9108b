"""Certificates: how well a model's results agree with those of its authors' code on this machine."""
