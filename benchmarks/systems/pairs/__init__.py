"""Systems that judge pairs of texts. Their texts are lists of two, and their vectors are probabilities by label."""
