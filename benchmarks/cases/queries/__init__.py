"""queries: many clients that wait for an answer each, of ours and of infinity's server."""
