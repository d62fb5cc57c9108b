"""The interface of encoders, and the choice of one for a device. Imports no framework."""
