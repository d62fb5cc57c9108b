"""Benchmarks of Vectormill: `python -m benchmarks NAME`. See README.md in this folder."""
