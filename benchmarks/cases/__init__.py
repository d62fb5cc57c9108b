"""The benchmarks: each measures one promise and answers with one report."""
