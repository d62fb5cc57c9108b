"""Speed and memory, measured on this machine and written into README.md. Nothing of the product imports this."""
