"""What a worker tells of itself in its report, and how others read it."""
