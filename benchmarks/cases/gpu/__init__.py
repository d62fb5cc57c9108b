"""The first hour on a card: what is tried, in which order, within which time, and what follows from it."""
