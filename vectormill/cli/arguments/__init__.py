"""Arguments and options that several commands share."""
