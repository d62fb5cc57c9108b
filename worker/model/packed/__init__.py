"""A network computed without padding: its kernels, what it is compared with, and how sequences are laid together."""
