"""Benchmarks of Vectormill: `python -m benchmarks NAME`. See README.md beside this file."""
