"""What keeps collections in step with their sources, as clients send it and as it is answered."""
