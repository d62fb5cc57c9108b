"""Terms that all features share: encoding specs, tasks, errors. Only the standard library is imported."""
