"""Start, supervise, log and end processes safely."""
