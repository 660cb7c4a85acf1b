"""Starts the members of a run, in processes, on ranks or as threads, and watches over them."""
