"""Request batches: reading their lines into jobs, and writing what came of them."""
