"""Intake: jobs, pushes and puts of clients, checked and written."""
