"""Streams: read and write the bodies of requests and responses in constant memory."""
