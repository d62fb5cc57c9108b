"""Webhooks: who is told of the ends of jobs and runs. The tables, their SQL, the types, the bodies and the sending."""
