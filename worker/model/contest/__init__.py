"""Which backend is faster on this machine: measured once in processes that then end, and kept on disk."""
