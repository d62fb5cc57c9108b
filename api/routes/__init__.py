"""The routes of the HTTP interface, one file per noun.

Each calls vectormill and returns the answer as JSON.
"""
