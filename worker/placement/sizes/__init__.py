"""What models need, and how long they take: bytes and seconds."""
