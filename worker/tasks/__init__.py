"""The work on an item before the model, and on the model's answer after it. Imports no framework, knows no batches."""
