"""One file per noun of the HTTP interface; each turns a request into calls of vectormill and their answer into JSON."""
