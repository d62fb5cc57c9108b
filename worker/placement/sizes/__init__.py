"""Sizes of models: the bytes that they need and the seconds that they take."""
