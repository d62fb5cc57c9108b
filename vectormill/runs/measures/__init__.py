"""What checks and canaries ask of a generation's rows; what it means, the indexer decides."""
