"""The indexer: carries out runs, which bring collections up to date with their sources; needs no torch."""
