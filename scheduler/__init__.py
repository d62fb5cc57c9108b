"""The background duties, one a file: dispatcher, reaper, pruner. Imports vectormill; never api or worker."""
