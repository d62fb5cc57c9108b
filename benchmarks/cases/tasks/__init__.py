"""The benchmarks of tasks other than embedding."""
