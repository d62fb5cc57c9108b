"""Models in torch: networks, attention, pooling, and the encoder that runs them. Importing it loads torch."""
