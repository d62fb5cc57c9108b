"""Routes of sources, runs and schedules."""
