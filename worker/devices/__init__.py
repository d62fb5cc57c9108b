"""The devices of this machine, and the environment that pins a process to one of them. Imports no torch."""
