"""Explanations of a plan: sentences, and a drawing."""
