"""Intake: check and store the jobs, pushes, puts and files that clients send."""
