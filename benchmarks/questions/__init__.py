"""The benchmarks, one per file: `run(harness)` measures and returns a report."""
