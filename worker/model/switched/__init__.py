"""Implementations of the switches of worker/encoder/switches.py, and the probe that has the last word."""
