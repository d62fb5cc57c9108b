"""Commands for sources, runs and schedules."""
