"""Plan which device loads which part of a model, from the memory and arithmetic it needs. Imports no torch."""
