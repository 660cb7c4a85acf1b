"""The exchange of contributions: what it is, what it keeps, and how a member of any kind reaches it."""
