"""Runs, what makes them (schedules, pushes, changes), what they read and what they compare."""
