"""Schedules: when collections are re-indexed. The table, its SQL, the types and the bodies of the HTTP interface."""
