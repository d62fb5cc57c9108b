"""Plan which device loads which part of a model, by its memory and arithmetic. Imports no torch."""
