"""What is shown to a person who waits."""
