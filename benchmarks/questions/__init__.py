"""A file a question: `run(harness)` measures and answers with a report."""
