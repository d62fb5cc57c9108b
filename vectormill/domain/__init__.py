"""What things are: jobs, items, chunks, collections, encoding specs. Imports the standard library only."""
