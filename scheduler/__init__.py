"""The background duties of the scheduler, one in each file. Imports vectormill, but never api or worker."""
