"""Search of collections: searches, filters and their SQL, query plans, and the bodies of requests and responses."""
