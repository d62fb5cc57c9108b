"""The views of the command line: progress bars, tables and sentences."""
