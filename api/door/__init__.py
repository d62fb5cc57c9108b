"""The door: who may come in, under which name of this machine, and from which pages. Knows no job and no vector."""
