"""Jobs: submitted, steered, waited for, exported, deleted. Tables, SQL and types; their chunks below."""
