"""The devices of this machine, and the environment that pins a process to one. Imports no torch."""
