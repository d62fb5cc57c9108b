"""Files: read texts and write vectors as streams, independently of jobs and HTTP."""
