"""Bodies that are streamed, in and out."""
