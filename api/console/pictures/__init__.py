"""Pictures: what a page draws of many rows, computed with NumPy. Nothing here reads or renders."""
