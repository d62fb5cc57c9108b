"""Divide one model among several devices, fill the parts and run them together."""
