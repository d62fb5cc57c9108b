"""Bodies: the JSON of requests and answers, one file a noun."""
