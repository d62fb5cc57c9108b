"""What an engine of ours could reach with its batches: the same computation, and nothing around it."""
