"""Tasks: what is done to an item before the model and to the model's answer after it. No framework here, no batches."""
