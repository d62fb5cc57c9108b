"""Request batches: files of requests that become jobs, and files of answers. Tables, SQL, types, bodies, lines."""
