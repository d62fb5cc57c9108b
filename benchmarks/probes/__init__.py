"""What is read off processes, models and the machine. Knows nothing of what is being compared."""
