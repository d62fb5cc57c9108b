"""Plan which device loads what of a model, by what the model needs. Imports no torch."""
