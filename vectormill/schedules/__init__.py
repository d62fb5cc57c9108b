"""Schedules: when collections are re-indexed, with their table, SQL, types and HTTP bodies."""
