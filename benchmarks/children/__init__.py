"""Programs that are measured in processes of their own.

Those of peers import no module of ours but `serving`.
"""
