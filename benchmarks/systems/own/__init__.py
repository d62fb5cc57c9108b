"""Our own processes, as systems to measure."""
