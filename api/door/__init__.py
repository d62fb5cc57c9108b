"""Admission of requests: checks of limits, host names, origins, keys and scopes, and the request observer."""
