"""Devices: those of this machine, and the environment that pins a process to one. No torch."""
