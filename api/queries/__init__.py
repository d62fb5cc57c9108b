"""Texts of searches that become vectors: by a message to a worker, or by a job where only old workers live."""
