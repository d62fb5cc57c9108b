"""The phases of a run, one file each."""
