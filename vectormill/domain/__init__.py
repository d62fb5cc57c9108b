"""Words that all features share: encoding specs, tasks, errors. Imports the standard library only."""
