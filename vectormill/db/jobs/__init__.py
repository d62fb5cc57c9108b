"""Jobs and their chunks: submitted, dispatched, claimed, committed, repaired, exported and removed."""
