"""The page of a run: its data, the server and the page itself."""
