"""The background duties, one a file. Imports vectormill; never api or worker."""
