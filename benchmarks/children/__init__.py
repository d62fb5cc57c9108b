"""Programs that are measured in processes of their own; those of peers import nothing of ours but `serving`."""
