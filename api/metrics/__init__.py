"""What Prometheus is told."""
