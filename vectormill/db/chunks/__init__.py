"""Chunks: their dispatch, claims, texts, commits and rescue."""
