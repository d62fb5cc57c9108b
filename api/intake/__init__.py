"""What clients send: jobs, pushes and puts, checked and written."""
