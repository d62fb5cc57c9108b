"""Batches to vectors: encoders, pooling, and the choice between backends. torch begins here."""
