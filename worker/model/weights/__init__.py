"""Weights in fewer bits than the arithmetic: rounded once, then held by a converted graph or by a torch module."""
