"""Files of texts in and of vectors out, read and written as streams. Knows nothing of jobs or of HTTP."""
