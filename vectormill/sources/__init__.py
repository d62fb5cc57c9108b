"""Sources: where the texts of a collection come from, one file a kind. Knows nothing of runs or vectors."""
