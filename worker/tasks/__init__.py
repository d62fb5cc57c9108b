"""Tasks: the work on an item before the model and on the model's answer after it. No framework here, no batches."""
