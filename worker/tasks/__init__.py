"""Tasks: the work on items before the model runs and on its results afterwards. Imports no framework."""
